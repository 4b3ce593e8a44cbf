"""Transformers, Accelerate and datasets: the only layer that knows them."""
