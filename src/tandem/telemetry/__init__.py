"""Logs and metrics. Imports no other package of Tandem, so that every package may import it."""
