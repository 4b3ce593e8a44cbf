"""Saves and loads sharded and staged models in the checkpoint format of Hugging Face."""
