"""Calculates how many nodes of which kind a load requires."""
