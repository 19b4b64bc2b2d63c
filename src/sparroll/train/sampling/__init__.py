"""From prompts to graded groups of rollouts: which prompts, sampling, rewards, groups, advantages."""
