"""Benchmarks for one GPU: `smoke.py` checks that all paths work there, `matrix.py` measures them, `kernel_speed.py` the kernels."""
