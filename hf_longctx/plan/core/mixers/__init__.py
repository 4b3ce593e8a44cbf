"""Sizes of mixers that carry a state along the sequence."""
