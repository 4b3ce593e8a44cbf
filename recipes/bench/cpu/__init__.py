"""Benchmarks for one machine without a GPU."""
