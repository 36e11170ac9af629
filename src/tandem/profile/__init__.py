"""Measures the forwards of one node, and fits a profile to the measurements."""
