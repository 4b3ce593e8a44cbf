"""Training scripts, launch files and configurations."""
