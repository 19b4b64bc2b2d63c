"""Kernels that sum up what a decode step does not read: triton_unread.py where scoring weighs groups, else
triton_remainder.py. remainder_reference.py, beside this folder, is the specification."""
