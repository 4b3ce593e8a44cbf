"""Attention of one tile of queries and keys, by the kernels that are there."""
