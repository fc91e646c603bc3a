"""Text ↔ token ids: chat templates, tokenising, detokenising, stop strings. Nothing else in Twinflow knows text."""
