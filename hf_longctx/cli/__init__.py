"""The command line `hf-longctx`; heavy imports happen inside the sub-commands."""
