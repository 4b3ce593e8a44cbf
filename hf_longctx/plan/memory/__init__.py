"""Bytes of a layer, a micro-batch and a stage."""
