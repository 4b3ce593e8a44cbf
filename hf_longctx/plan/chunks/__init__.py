"""Make chunks from sequences: cut long sequences into slices and pack short ones."""
