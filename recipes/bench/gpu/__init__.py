"""Benchmarks for one GPU: `smoke.py` checks all paths, `matrix.py` measures them, `measurements.py` runs several."""
