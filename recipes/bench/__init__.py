"""Benchmarks, which are run as scripts; each prints its own manual with --help."""
