"""A step's plan made ahead, its samples, and predictions held against measurements."""
