"""What runs inside vLLM's workers: sparse attention backends, the index beside the KV cache, and counters of what ran."""
