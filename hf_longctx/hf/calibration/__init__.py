"""Measured coefficients of the cost model, for one model on these ranks."""
