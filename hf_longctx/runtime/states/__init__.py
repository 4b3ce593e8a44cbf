"""Layers with a state along the sequence (linear attention, SSM, convolution) under plans."""
