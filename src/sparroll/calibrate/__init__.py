"""From a model and prompts to a schedule file: measure the tail at each budget of a grid (sweep.py), fit the smallest
budget for each length (fit.py), and verify it with rollouts under the fitted schedule (verify.py). profile.py measures
without fitting.

Not here: what a schedule saves (plan/), and changing budgets during training (control/).
"""
