"""Benchmarks for one GPU: `smoke.py` checks all paths, `matrix.py` measures them, `session.py` runs what fits a quarter of an hour."""
