"""Activation policies per stage and chunk of a pipeline (InfiniPipe)."""
