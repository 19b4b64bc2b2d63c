"""DistillSparse: an adapter that only sparse rollouts see, trained beside the policy or against a frozen one (run.py)."""
