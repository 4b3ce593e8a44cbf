"""Grouping by integer and configuration programs."""
