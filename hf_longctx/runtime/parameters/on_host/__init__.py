"""Shards of weights that lie in host memory while a step computes."""
