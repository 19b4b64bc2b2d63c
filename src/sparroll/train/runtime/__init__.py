"""What keeps a run alive and reproducible: checkpoints, Ctrl-C, seeds, several processes, and where the metrics go. No
learning happens here."""
