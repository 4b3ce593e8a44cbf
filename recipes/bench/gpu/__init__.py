"""Benchmarks for one GPU: `smoke.py` checks that all paths work, `matrix.py` measures them, `kernel_speed.py` times kernels, `session.py` has it all in order."""
