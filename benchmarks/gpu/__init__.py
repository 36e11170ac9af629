"""Benchmarks that need a GPU; `python -m benchmarks.gpu.roofline` is the one command."""
