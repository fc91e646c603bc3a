"""Admission: who may ask, how much, and in which order requests go on to the choice of workers."""
