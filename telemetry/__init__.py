"""Logs and metrics. Imports nothing of ours, so that everything may import it."""
