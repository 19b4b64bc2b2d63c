"""Sparse rollouts inside vLLM: a plugin, no fork. Importing this package imports neither vllm nor CUDA.

plugin.py      the entry point: tells vLLM where the backends are
settings.py    what the user asked for, from `additional_config` or the environment
compat.py      everything that depends on vLLM's version, and what is refused
attention/     what runs inside vLLM's workers
scores/        log-probabilities and lists of the likeliest tokens, in them
windows/       drafts that the dense policy checks, window by window
engine.py      VLLMEngine: vLLM in this process behind the engine protocol; launch.py and arguments.py start it, with
               what model_files.py reads of the model
capacity.py    which schedules an engine can go on with
requests.py    what vLLM is asked for, run to its end; outputs.py: from what it returns to rollouts
step_check.py  whether the backend counted every step that the rollouts needed
rescoring.py   a replica measures its own rollouts; lists_route.py: a server gives a trainer the lists to do so
worker.py      what vLLM's workers can be asked for
serve_args.py  the arguments of `vllm serve` for a schedule
"""
