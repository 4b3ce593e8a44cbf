"""Plans as pure data: sequence lengths in, a `StepPlan` out. Never imports torch or any Hugging Face library."""
