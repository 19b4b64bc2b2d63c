"""HFEngine: rollouts from any transformers decoder with plain attention, exact and readable, and the reference for
every other engine. engine.py is the interface, run.py one `generate` call, kv_cache.py the cache, attention.py what
replaces the model's own.

Not here: speed on a GPU, which is vLLM's part.
"""
