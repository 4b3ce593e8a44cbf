"""How the context of a plan reaches attention and mixers in models that do not pass it on, and whose a forward is."""
