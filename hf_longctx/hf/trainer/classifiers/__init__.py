"""Evaluations of models that classify documents or tokens: their logits are small, so metrics see all of them."""
