"""Verified rollouts inside vLLM: one step of vLLM's scheduler is one window of a request. Installed by the plugin for an
engine whose schedule checks its drafts, and only there.

configure.py   what the configuration of such an engine names, and what it refuses
scheduler.py   gives each decoding request the rows of its next window; prompts go first
worker.py      vLLM's workers with runner.py in them, for CUDA and CPU
runner.py      vLLM's V1 model runner: drafts before a step, checks after it
drafting.py    the loop of sparse one-token steps
draws.py       temperatures, and tokens drawn from logits; triton_draws.py is its kernel
settling.py    the rule of draft_check.py applied to the windows of a step
requests.py    what the worker keeps about a request: its draws, and what the checks said
packing.py     that as bytes, for an engine in another process
masses.py      what the rule needs to know of two distributions; triton_masses.py is its kernel

The scheduler, the prefix cache and the outputs see tokens only once they are checked; drafts live within a step.
"""
