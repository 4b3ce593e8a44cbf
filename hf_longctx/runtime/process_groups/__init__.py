"""Process groups of a run, and the links between pipeline stages."""
