"""Requests and steps: which tokens the next forward computes."""
