"""Choosing units and attending to them in one decode step. api.py is for contiguous caches, paged.py for paged ones.
Each has its specification in plain PyTorch (reference.py, paged_reference.py). The Triton kernels are for paged caches
and have the specification's signatures.

Not here: the definition of a unit's score (selectors/), and the caches (engines/).
"""
