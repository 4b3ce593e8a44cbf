"""Ready-made training: the script `sft.py` with its settings and data, launch files, configurations, and benchmarks.

Run the scripts from the repository root; installed, they are `hf_longctx.recipes`.
"""
