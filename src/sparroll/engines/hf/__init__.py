"""HFEngine: rollouts from any transformers decoder. It is the oracle for every other engine."""
