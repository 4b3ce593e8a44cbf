"""What plans would do without running them: workloads, forecasts with their baselines, memory, tables and pictures."""
