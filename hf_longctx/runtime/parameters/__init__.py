"""Gradient sums over ranks, parameters sharded by FSDP2, and gradient clipping across pipeline stages."""
