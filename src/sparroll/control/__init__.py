"""Who may change the schedule while a run trains, or end the run: the guard (guard.py), the controller (controller.py),
cheaper schedules (cheaper_schedules.py), and the watch on empty steps (empty_steps.py). unrewarded_steps.py only says
that nothing is rewarded. All of them are watchers with one protocol (watcher.py). They only decide, from what a step
measured, so any trainer can use them. tail_window.py and length_bins.py hold what they decide on; impossible_limit.py
and held_statistic.py say when the share of impossible tokens, or the tail, is on the wrong side.

A control group of dense rollouts shows the guard what sparsity costs: control_group.py chooses them,
paired_prompts.py compares them with the sparse ones of the same prompts, gap_evidence.py tests whether there is a gap,
and reward_gap.py pools all of it and says when there is an alarm.

Not here: measuring the tail (mismatch/), and carrying a decision out, which the training loop does. No engine runs
here.
"""
