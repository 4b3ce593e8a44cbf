"""The scripts of `recipes/bench/gpu` on the fake device, at toy sizes."""
