"""Kernels that score all units of each (request, head). triton_score.py is what paged.score_units launches."""
