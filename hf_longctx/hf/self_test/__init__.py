"""The self-test at the start of a run: the plan on a small copy against plain transformers."""
