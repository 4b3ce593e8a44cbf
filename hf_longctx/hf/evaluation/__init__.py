"""Evaluation at long context: perplexity by position, needles, pictures."""
