"""Benchmarks of data on the CPU: the index of a large dataset, and streams with one or several readers."""
