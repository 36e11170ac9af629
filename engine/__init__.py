"""Runs a model on one device group: pages, prefix cache, batches, forwards, sampling. No sockets, no text."""
