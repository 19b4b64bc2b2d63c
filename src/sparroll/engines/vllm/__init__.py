"""Sparse rollouts inside vLLM: a plugin, no fork. Importing this package imports neither vllm nor CUDA.

plugin.py     entry point: tells vLLM where the backends are
settings.py   what the user asked for, from `additional_config` or the environment
compat.py     all that depends on vLLM's version, and what is refused
state.py      one object per worker: the schedule on the device, and what ran
batch.py      which rows of a step decode, and what they read
landmarks.py  the index as extra layers of the KV cache
cpu.py        the backend on CPU, by the reference operations
backend.py    the backend on CUDA
"""
