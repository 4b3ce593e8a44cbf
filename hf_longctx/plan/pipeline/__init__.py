"""Pipeline schedules over slices: candidates, orders, messages and lent stages (Seq1F1B, InfiniPipe)."""
