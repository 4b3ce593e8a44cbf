"""Evaluations of language models: scores of single tokens, and the metrics that are made of them."""
