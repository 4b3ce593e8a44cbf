"""Evaluates a model on long documents during training: held-out loss by position, and needles hidden in long documents."""
