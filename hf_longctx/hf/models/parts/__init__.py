"""Models of which a rank holds one pipeline stage: what they refuse, and how they become whole again."""
