"""RMS norm over groups of channels, of an input that was gated before (Mamba-2's output norm)."""
