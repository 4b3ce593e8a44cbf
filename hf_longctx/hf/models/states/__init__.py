"""Mixers with a state along the sequence: which functions of theirs run under plans, and how a model gets them."""
