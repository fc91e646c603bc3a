"""HTTP: OpenAI's API, health and metrics. Knows nothing of workers beyond what `generation` tells."""
