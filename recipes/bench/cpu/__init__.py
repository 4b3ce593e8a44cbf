"""Benchmarks that run on a machine without a GPU: training steps against Hugging Face, data, packing, and planning time."""
