"""From a model and prompts to a schedule file: measure the tail at each budget of a grid (sweep.py), fit the cheapest
budget per length (fit.py), verify with the fitted schedule itself (verify.py). profile.py measures without fitting.

Not here: what a schedule saves (plan/), and changing budgets while a run trains (control/).
"""
