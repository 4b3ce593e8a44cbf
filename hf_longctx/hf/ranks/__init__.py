"""Agreement among ranks, the launcher's environment, shared host memory, and the naming of lost ranks."""
