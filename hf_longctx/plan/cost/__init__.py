"""Seconds of a chunk on a group: the cost model, sent bytes, fits to measurements, hardware profiles, known models."""
