"""Checkpoints of sharded and staged models, in the format of Hugging Face."""
