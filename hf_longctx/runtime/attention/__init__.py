"""Attention of a chunk over its sequence group: Ulysses, ring, and slices that read earlier slices from the K/V book."""
