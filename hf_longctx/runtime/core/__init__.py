"""Chunk inputs, the loss, the step clock, memory layouts, time limits and method binding, used all over the runtime."""
