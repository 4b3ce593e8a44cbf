"""Finds norms, gated activations and rotary embeddings of a model, and lets them run as single kernels."""
