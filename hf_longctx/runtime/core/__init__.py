"""Chunk inputs, the loss, the step clock and method binding, used by every other package of the runtime."""
