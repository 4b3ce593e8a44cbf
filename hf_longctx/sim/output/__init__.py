"""Forecasts as text, JSON and pictures."""
