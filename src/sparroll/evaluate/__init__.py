"""How often a policy is right, with intervals over problems: mean@k, pass@k, majority@k, dense and sparse on the same
problems. run.py samples and judges, log.py makes it resumable, summary.py computes the figures, compare.py sets two
runs side by side.

Not here: prompts and verdicts (tasks/), and training.
"""
