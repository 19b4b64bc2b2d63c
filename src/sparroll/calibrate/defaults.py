"""What a calibration takes where the user names nothing else, and where these figures come from. Constants; imports
nothing, so that the command line can show them at once."""

from __future__ import annotations

DEFAULT_TARGET = 0.86
"""The least 5th percentile of the acceptance at every length: the published one, for rollouts whose drafts nobody checks."""
CHECKED_KL_AT_MOST = 0.03
"""With checks of drafts, the largest mean KL of what is kept at any length. In the study's runs of 60 steps with checks,
budgets whose kept tokens had a KL of .006 to .028 over all lengths trained like dense rollouts, as far as three seeds tell
(mismatch-study-verified-rollouts-60-steps-h200.json and the two records of other checks and budgets). With .089, under 64
tokens everywhere, checked rollouts solved fewer problems than dense ones (mismatch-study-checks-h200.json). That is one
model and one task."""
PROMPTS, SAMPLES, MOST_BUDGETS, VERIFY_ROUNDS = 24, 1, 5, 4
"""Prompts and rollouts of each; how many budgets of the published grid are measured at most; and rounds of verification at
most. With a dense set that is at most ten sets of 24 rollouts, which stays below a third of an evaluation, with one check
of drafts, too (effort/cost_ahead.py)."""
BATCH, BATCH_TOGETHER = 64, 256
"""Rollouts that decode together; and where the engine samples several schedules together. Five budgets took 73 s together
where a single schedule took 31 (calibration-cost-qwen3-1.7b-h200.json)."""
EVALUATION_PROBLEMS, EVALUATION_SAMPLES = 60, 16
"""What a calibration is compared with: two sets of 30 problems with 16 samples each, with responses as long as those of the
calibration."""
MOST_OF_AN_EVALUATION = 1 / 3
SCORED_SHARE = 0.15
"""What a scored token costs, in sampled ones. A trainer's scoring pass took .07 of the time of dense rollouts and .12 to .13
of that of sparse ones (training-step-h200.json, training-step-verified-h200.json), and checks .15 of that of their drafts
(the latter)."""
