"""The trainer and its mixins, the start of a run, and the placement of parameters on ranks."""
