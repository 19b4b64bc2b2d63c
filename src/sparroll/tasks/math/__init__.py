"""Whether a boxed answer equals the gold answer: answer.py finds it in the response, worker.py compares it with
math-verify in worker processes that pool.py replaces when they pass a limit, reward.py gives the verdict.

Not here: prompts and data sets (tasks/data/).
"""
