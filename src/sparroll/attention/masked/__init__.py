"""Sparse attention inside a training pass, with gradients: every position of a whole sequence reads the units that a
decode step of that length would have read. api.py is the entry and reference.py the specification. unit_choice.py
chooses the units, and unit_bitmap.py keeps the choice as one bit per unit and position.

Not here: decoding. The choice itself has no gradient.
"""
