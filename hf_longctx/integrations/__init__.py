"""Plug-ins through which other frameworks run plans. Each module is imported by its framework only."""
