"""Models by name or path, and new weights for a running node."""
