"""Seconds of a chunk on a group: the cost model, its fit to measurements, and profiles of hardware."""
