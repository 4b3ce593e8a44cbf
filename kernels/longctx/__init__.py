"""Triton operations and their plain-torch references. Imports torch and triton only."""
