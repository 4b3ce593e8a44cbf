"""The command line; heavy imports happen inside sub-commands."""
