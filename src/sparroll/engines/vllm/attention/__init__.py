"""What runs inside vLLM's workers: the sparse attention backends for CUDA and CPU, the index beside the KV cache, and
counters of what ran. state.py is the one object per worker that they share; batch.py says which rows of a step decode.

Not here: the kernels (sparroll.attention.decode), and anything that runs in the process of VLLMEngine.
"""
