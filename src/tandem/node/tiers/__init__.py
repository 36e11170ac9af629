"""Tiers of a node: pages in host memory, in files or in a store."""
