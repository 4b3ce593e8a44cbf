"""The plan as data: its types, JSON, checks, orders and messages, and the settings and cluster from which it is made."""
