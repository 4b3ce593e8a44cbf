"""Activation policies of a group: which shares of its saved tensors are kept, offloaded or recomputed."""
