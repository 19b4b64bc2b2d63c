"""What keeps a run alive and reproducible: checkpoints, interrupts, seeds, processes, and the files that metrics go to."""
