"""Sequences of a step placed on sequence groups of different sizes (FlexSP)."""
