"""What one decode step reads from the cache, and the attention over it: api.py for contiguous caches, paged.py for paged
ones, each with its specification in plain PyTorch; the Triton kernels have the same signatures."""
