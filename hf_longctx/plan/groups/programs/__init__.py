"""Group micro-batches by integer programs: solvers "lp" and "milp" of the planner, and the bound that measures them."""
