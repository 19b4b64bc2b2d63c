"""HFEngine: rollouts from any transformers decoder with plain attention. It is exact and readable, and the reference
for every other engine. engine.py is the interface, run.py one `generate` call, kv_cache.py the cache, and attention.py
replaces the model's own attention.

Not here: speed on a GPU; use vLLM for that.
"""
