"""Every field of `TrainingArguments`: what becomes of it under plans, and settings of other systems as ours."""
