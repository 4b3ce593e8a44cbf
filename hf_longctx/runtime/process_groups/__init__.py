"""Process groups of a run, and the messages between its pipeline stages."""
