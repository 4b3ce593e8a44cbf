"""Activation policies carried out: kept, offloaded and recomputed tensors of a layer."""
