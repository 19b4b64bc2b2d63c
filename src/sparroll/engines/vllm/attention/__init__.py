"""What runs inside vLLM's workers: the sparse attention backends for CUDA and CPU (cuda_backend.py, cpu_backend.py,
with layer.py in common), the index beside the KV cache (landmarks.py), and counters of what ran. state.py holds the one
object per worker that they share: the schedule as the device reads it (device_budgets.py) and as the host counts it
(decode_rows.py). batch.py says which rows of a step decode, request_schedules.py which schedule each of them has,
preemptions.py counts what preemptions cost, and pages.py lets FlashAttention 3 read units.

Not here: the kernels (sparroll.attention.decode), and anything that runs in the process of VLLMEngine.
"""
