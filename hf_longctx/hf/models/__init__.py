"""What is read from, and patched into, Hugging Face models."""
