"""The callback for a stock trainer, alone or attached."""
