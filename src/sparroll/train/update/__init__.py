"""The gradient step of a policy: the loss (loss.py), which rollouts go through the model together (micro_batches.py),
AdamW (optimizer.py), and the policy's update that puts them together (policy.py).

Not here: the correction's weights (corrections/), and the adapter's loss (train/distill/).
"""
