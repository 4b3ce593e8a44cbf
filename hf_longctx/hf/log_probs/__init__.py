"""Losses of tokens' log-probabilities (preferences, reinforcement learning) under plans, with exact gradients."""
