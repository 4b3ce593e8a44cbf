"""The trainer, its mixins, and where parameters live."""
