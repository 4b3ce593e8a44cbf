"""Executes activation policies: which saved tensors of a layer are kept, offloaded or recomputed."""
