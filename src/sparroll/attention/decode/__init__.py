"""Choosing units and attending to them in one decode step. api.py is for contiguous caches, paged.py for paged ones;
each has its specification in plain PyTorch (reference.py, paged_reference.py), and the Triton kernels have the same
signatures.

Not here: the score of a unit, which is the selector's, and the caches, which are the engine's.
"""
