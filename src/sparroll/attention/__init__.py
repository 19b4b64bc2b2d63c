"""What one decode step reads from the KV cache. A selector (selectors/) scores units of the cache. The best units
within the budget are attended to exactly, for one step at a time (decode/) or for every position of a training pass
(masked/).

Not here: the size of the budget (schedule/), running the model (engines/), and dropping tokens for good
(compression/).
"""
