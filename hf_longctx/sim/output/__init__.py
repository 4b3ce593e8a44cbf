"""Writes forecasts and simulations as text, JSON and pictures."""
