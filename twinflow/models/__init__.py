"""Models: one description per family over shared layers, loaded from Hugging Face checkpoints."""
