"""The choice of each token from its logits."""
