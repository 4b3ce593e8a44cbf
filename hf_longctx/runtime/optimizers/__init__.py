"""Optimizers that need whole weights, on whole weights and on shards."""
