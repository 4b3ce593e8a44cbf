"""Losses of log-probabilities of tokens (preferences, reinforcement learning): computed under plans, with exact gradients."""
