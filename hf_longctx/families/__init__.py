"""Facts about the model classes of transformers, as plain data."""
