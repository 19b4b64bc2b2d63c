"""How much a calibration measures: which budgets of a grid are run (coarse_to_fine.py), and what all of it costs beside an
evaluation (cost_ahead.py). What follows from the measurements is decided elsewhere.
"""
