"""Self-test at the start of a run: compares planned steps on a reduced copy of the model with plain transformers."""
