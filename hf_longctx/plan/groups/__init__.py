"""Assign the sequences of a step to micro-batches and sequence groups of different sizes (FlexSP)."""
