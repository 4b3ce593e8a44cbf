"""Hydra files for verl, found by `hydra.searchpath=[pkg://hf_longctx.integrations.verl_config]`."""
