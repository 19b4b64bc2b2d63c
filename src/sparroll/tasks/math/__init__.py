"""Whether a boxed answer equals the gold answer. answer.py finds it in the response, chinese.py reads
Chinese words around it, worker.py compares it with math-verify in worker processes, pool.py replaces workers that pass
a limit, and reward.py gives the verdict.

Not here: prompts and data sets (tasks/data/).
"""
