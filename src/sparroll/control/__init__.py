"""Who may change the schedule while a run trains, or end the run: the guard, the controller, cheaper schedules, and the
watch on empty steps. All are watchers of one protocol (watcher.py): pure decisions on what a step measured, for any
trainer.

Not here: measuring the tail (mismatch/), and carrying a decision out, which is the loop's part. No engine runs here.
"""
