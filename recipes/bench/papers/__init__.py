"""Reproduces published tables of FlexSP, Seq1F1B, SPPO and InfiniPipe: the planner plans their workloads and predicts times.

`lending` and `zero_bubble` ask what ideas would gain that the papers propose or leave out.
"""
