"""What one decode step reads from the KV cache. A selector (selectors/) scores units of the cache; the best ones within
the budget are attended to exactly, one step at a time (decode/) or for every position of a training pass (masked/).

Not here: how large the budget is (schedule.py), who runs the model (engines/), and dropping tokens for good
(compression/).
"""
