"""Types of a plan, the specs of model, cluster and settings it is made from, and the checks it must pass."""
