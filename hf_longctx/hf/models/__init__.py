"""Reads Hugging Face models and configs, and binds our attention, rotary embeddings and stages to their instances."""
