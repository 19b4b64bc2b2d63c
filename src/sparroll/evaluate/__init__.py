"""How often a policy is right, with intervals over problems: mean@k, pass@k, majority@k, dense and sparse on the same
problems. request.py says what is asked for, run.py samples and judges, log.py keeps the samples, summary.py computes
the figures, text.py prints them, and compare.py compares two evaluations. rollout_file.py is the file of `sparroll
rollout`.

Not here: prompts and verdicts (tasks/), and training.
"""
