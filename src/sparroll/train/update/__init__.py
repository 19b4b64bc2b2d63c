"""The policy's gradient step: loss, micro batches, optimizer."""
