"""Basics of the runtime: chunk inputs, losses, dropout, kernels, the step clock, host copies and method binding."""
