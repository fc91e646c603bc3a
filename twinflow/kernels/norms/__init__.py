"""RMS norms: plain, with unit offset (1 + w), and followed by a SiLU gate."""
