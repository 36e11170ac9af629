"""Benchmarks. Each one is a program: `python -m benchmarks.NAME --help`."""
