"""Kernels for CPUs and GPUs."""
