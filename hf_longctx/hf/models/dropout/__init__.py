"""Dropout modules of one model that draw their masks by token."""
