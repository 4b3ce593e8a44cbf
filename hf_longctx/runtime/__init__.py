"""Torch and torch.distributed: obeys plans. Of `plan` it imports only types, specs, serialize and sharding."""
