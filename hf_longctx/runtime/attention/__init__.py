"""Attention of a chunk over a sequence group: Ulysses, ring, slices with a K/V book."""
