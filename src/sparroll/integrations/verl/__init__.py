"""Sparse rollouts inside verl 0.9.1. verl distributes, shards, syncs weights, and writes checkpoints; the engine plugin,
the tail, the corrections, the guard and the controller are sparroll's. Nothing of verl is patched.

A step: verl's servers sample (server.py), and each replica measures its own rollouts before it sleeps (tap.py). On the
driver, trainers.py corrects the batch (loss_fields.py), merges what the replicas measured, shows it to the watchers
(steps.py, ../watched.py), and sets the next schedule on all replicas. main.py is the entry point, settings.py reads
`actor_rollout_ref.rollout.custom.sparroll`, and refusals.py says what of verl's own configuration contradicts it.
worker.py is what vLLM's workers run. With a control group, control_rows.py draws who is in it and finds its rollouts in
the batch, and agent_loops.py tells vLLM which requests are dense. What a resumed run needs goes into verl's checkpoints
(../saved_state.py).

Only main.py, trainers.py, server.py, agent_loops.py and worker.py import verl, Ray or vLLM.
"""
