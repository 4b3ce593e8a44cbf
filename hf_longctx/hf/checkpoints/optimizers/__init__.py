"""Optimizers of checkpoints: the weights to which their states belong."""
