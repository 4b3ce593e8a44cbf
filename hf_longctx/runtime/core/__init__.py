"""Inputs of a chunk, the loss, clocks and small tools that every other room uses."""
