"""Images and videos in rows: where they lie, how many tokens they take, and what towers read."""
