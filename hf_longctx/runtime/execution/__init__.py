"""Execution of a rank's plan, action by action."""
