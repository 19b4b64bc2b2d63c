"""DistillSparse: a LoRA adapter that only sparse rollouts see, trained to bring them back to the dense policy. The
adapter is trained beside the policy (adapter_update.py) or against a frozen one (run.py). schedule_replay.py measures
the tail under the next cheaper schedule.

Not here: the adapter's module and folder (engines/adapter.py), and the decision to go on with a cheaper schedule
(control/cheaper_schedules.py).
"""
