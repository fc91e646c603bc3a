"""One token per row from its logits, by the row's own parameters, without the host; and log-probabilities on request."""
