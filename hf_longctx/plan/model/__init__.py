"""The fields of model configs: their names, and what they say about a class of models."""
