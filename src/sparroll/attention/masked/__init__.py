"""Sparse attention inside a training pass, with gradients: every position of a whole sequence reads the units that a
decode step of that length would have read. api.py is the entry, reference.py the specification; the choice is kept as
one bit per unit.

Not here: decoding, and the gradient of the choice, which has none.
"""
