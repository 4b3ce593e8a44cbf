"""Models of which a rank holds a part: what they refuse, and how they become whole again."""
