"""Plans each step ahead, takes samples from finished steps, and compares predictions with measurements."""
