"""Model classes older than transformers' common interfaces for positions and attention: what they need to run under plans."""
