"""What keeps a run alive and reproducible: checkpoints (checkpoint.py), Ctrl-C (interrupts.py), seeds (randomness.py),
several processes (distributed.py), and where the metrics go (sinks.py). No learning happens here."""
