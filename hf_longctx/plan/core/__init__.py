"""The plan as data: its types, its JSON, the checks it must pass, and the model, cluster and settings it is made from."""
