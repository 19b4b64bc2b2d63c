"""Budgets by what a decode step costs: the least KL, or another loss, in a given time. From sweeps (../sweep.py) to a
schedule that ../verify.py measures.

Not here: the cheapest budgets that hold a target (../fit.py), and the choice of a check (../choice.py).
"""
