"""What holds for every test, before any module under test is imported."""

import os

import torch

# Read when a kernel is defined, by whichever test comes to import one first. Without a GPU nothing else runs Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
