"""Sparse rollouts inside vLLM: a plugin, no fork. Importing this package imports neither vllm nor CUDA.

plugin.py      the entry point: tells vLLM where the backends are
settings.py    what the user asked for, from `additional_config` or the environment
compat.py      everything that depends on vLLM's version, and what is refused
attention/     what runs inside vLLM's workers
windows/       drafts that the dense policy checks, window by window
engine.py      VLLMEngine: vLLM in this process behind the engine protocol; launch.py and arguments.py start it
outputs.py     from what vLLM returns to rollouts
weights.py     whether given weights fit the model
worker.py      what vLLM's workers can be asked for
serve_args.py  the arguments of `vllm serve` for a schedule
"""
