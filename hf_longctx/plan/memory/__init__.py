"""Bytes that a layer, a micro-batch and a stage hold."""
