"""`hf-longctx calibrate`: measures a model's chunks on these ranks and fits the coefficients of the cost model to them."""
