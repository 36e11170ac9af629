"""Runs a model on a device group: pages, prefix cache, batches, forwards and sampling. No sockets, no text."""
