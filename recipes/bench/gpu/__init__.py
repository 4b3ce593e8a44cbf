"""Benchmarks and first checks for GPUs."""
