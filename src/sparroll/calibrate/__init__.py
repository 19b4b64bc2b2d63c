"""From a model to a schedule: measure the tail (profile, sweep), fit a schedule, say what it costs (cost, plan)."""
