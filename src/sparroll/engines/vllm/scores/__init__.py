"""Log-probabilities of sampled tokens and lists of the likeliest ones, which vLLM's workers make in every decode step."""
