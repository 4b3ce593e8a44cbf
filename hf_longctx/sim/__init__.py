"""Simulates training steps without running them: workloads, forecasts, baselines, memory, tables and pictures."""
