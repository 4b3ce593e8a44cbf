"""Dropout whose masks depend on tokens, not on plans: a counter-based generator and the keys of tokens and modules."""
