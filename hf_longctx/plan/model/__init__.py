"""The model in numbers, for the planner: layers, sizes and query-key pairs, read from the fields of its config."""
