"""Files that start the recipes on the launchers and clusters of others; docs/guides/launching.md has the command for each."""
