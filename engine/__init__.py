"""A model on one device group: pages, prefix cache, batches, forward, sampling. No sockets, no text."""
