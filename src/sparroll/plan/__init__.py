"""What a schedule saves: eFLOPs (cost.py), and seconds on a device from the model's config (speedup.py)."""
