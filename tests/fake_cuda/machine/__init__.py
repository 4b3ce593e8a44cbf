"""The fake machine: its device, arithmetic, attention and communicator."""
