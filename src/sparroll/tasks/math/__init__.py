"""Whether a boxed answer is the gold answer: found in the response, compared in worker processes with a deadline."""
