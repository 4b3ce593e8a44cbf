"""Executes a rank's plan, action by action."""
