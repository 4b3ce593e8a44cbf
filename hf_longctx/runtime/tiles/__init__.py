"""Attention of one tile of queries and keys, computed by the fastest backend that is available."""
