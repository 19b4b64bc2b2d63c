"""How a loss moves weights: the formulas of the losses (loss.py), which rollouts go through the model together
(micro_batches.py), AdamW (optimizer.py), the gradient step that uses these (gradient_step.py), and the policy's update
(policy.py).

Not here: the correction's weights (corrections/), and the adapter's update (train/distill/), which shares the gradient
step.
"""
