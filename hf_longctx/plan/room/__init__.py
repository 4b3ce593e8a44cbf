"""Makes a plan fit the memory of its ranks: policies, slices and places of layers, by the seconds that they cost."""
