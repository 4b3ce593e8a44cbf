"""A run: connects a model and its plans, from the first check to the last save. Needs no Trainer object."""
