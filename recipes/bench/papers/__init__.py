"""Published tables of FlexSP, Seq1F1B, SPPO and InfiniPipe, reproduced by the planner and its predictions."""
