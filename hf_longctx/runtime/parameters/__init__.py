"""Gradient sums over ranks, parameters sharded by FSDP2, weights and states on the host, and clipping across stages."""
