"""What one decode step reads: selectors score units of the KV cache, the chosen units are attended exactly."""
