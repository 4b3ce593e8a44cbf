"""Self-test at the start of a run: compares planned steps with plain transformers, on a reduced copy of the model."""
