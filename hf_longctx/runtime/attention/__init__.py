"""Attention of a chunk over its sequence group: Ulysses, ring, and slices with earlier keys and values in the K/V book."""
