"""DistillSparse: a LoRA adapter that only sparse rollouts see, trained to bring them back to the dense policy: beside
the policy (adapter_update.py) or against a frozen one (run.py). cheaper_schedules.py goes on to smaller budgets as the
adapter learns.

Not here: the adapter's module and folder (engines/adapter.py).
"""
