"""Elementwise gates: sigmoid output gate of attention, SwiGLU of an MLP."""
