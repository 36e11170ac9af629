"""Clients of a running cluster: bench, batch, doctor and top."""
