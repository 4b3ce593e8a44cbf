"""Scans of mixers for which transformers has no code that starts from any state, runs fast enough and gives the last state."""
