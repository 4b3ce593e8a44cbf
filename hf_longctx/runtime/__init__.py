"""Executes plans with torch and torch.distributed; `hf` calls it. It imports nothing of `plan` but `plan.core`."""
