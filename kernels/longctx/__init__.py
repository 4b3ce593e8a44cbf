"""Triton operations and their plain-torch references. Imports only torch and triton."""
