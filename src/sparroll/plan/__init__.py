"""What a schedule saves, predicted without weights: seconds on a device from the model's config (speedup.py, which uses
step_reads.py, model_shape.py and hardware.py), and effective FLOPs (cost.py).

Not here: making a schedule (calibrate/), and measured speed (benchmarks/).
"""
