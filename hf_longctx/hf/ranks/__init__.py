"""Agreement among ranks, the launcher's environment, host memory, stop signals, and detection of lost ranks."""
