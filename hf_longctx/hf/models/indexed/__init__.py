"""Model classes in which an index chooses the keys that a token sees (DeepSeek sparse attention)."""
