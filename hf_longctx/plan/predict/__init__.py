"""Predicted seconds and bytes of a plan."""
