"""Gradients summed over ranks, sharded parameters, and the clipped norm."""
