"""Benchmarks that need a GPU, such as `python -m benchmarks.gpu.roofline`."""
