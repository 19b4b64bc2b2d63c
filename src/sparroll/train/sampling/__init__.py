"""The first half of a step, from prompts to judged groups of rollouts: prompts.py, rollouts.py, rewards.py, groups.py,
advantages.py. weight_sync.py brings the trainer's weights to the engine and checks that they arrived.

Not here: how an engine samples (engines/), and what a task checks (tasks/).
"""
