"""The first half of a step, from prompts to graded groups of rollouts: the task and its rows (task_data.py), the next
prompts (prompts.py), rollouts (rollouts.py) with the dense ones among them (control_group.py), rewards (rewards.py),
the choice of groups (groups.py) and advantages (advantages.py). weight_sync.py brings the trainer's weights to the
engine and checks that they arrived.

Not here: how an engine samples (engines/), and how a task checks a response (tasks/).
"""
