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
