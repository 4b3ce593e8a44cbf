"""Elementwise functions of layers as single kernels: compiled by torch, or taken from Liger."""
