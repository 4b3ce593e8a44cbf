"""Activation policies at run time: saved tensors of layers are kept, offloaded or recomputed as the plan decides."""
