"""Holds what is known about the model classes of transformers, as plain data."""
