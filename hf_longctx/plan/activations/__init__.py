"""Shares of activations that are kept, offloaded or recomputed on one group."""
