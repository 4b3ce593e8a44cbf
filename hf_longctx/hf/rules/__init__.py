"""Checks that refuse a run, with the reason. They have no side effect and call no collective."""
