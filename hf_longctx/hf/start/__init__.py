"""Starts a run: checks arguments, versions and models, and sets up memory and pipeline stages."""
