"""Benchmarks. Run them as scripts from the repository root; every one explains its options with --help.

`cpu` needs no GPU, `gpu` measures one GPU, `papers` reproduces published tables by prediction. `one_document` is what several
of them share.
"""
