"""Rotary position embedding, partial, NeoX halves."""
