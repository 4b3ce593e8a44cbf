"""Benchmarks for one GPU: `smoke.py` checks all paths, `matrix.py` measures them, `session.py` fills a quarter of an hour."""
