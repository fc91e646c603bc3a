"""What attention does before it attends: q/k norms, rotary embedding, K and V into the cache."""
