"""Kernels that choose the best units of each (request, head). triton_top_k.py is what paged.choose_units launches."""
