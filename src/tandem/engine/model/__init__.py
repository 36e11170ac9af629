"""Models: weights, forward, and the comparison with transformers."""
