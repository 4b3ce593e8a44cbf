"""Trains on iterable datasets: readers on many ranks read ahead, plans need lengths alone, and tokens go straight to ranks.

In the order of use: `sources` divides a dataset among readers, `rows` makes checked sequences of a reader's rows, `reader` does
so ahead of training in a thread, `composer` makes global batches from what readers announce, `exchange` sends tokens from readers
to the ranks that hold them, and `planned_stream` joins all of it with the plans. `overlap` finds rows that two readers read;
`place` and `states` say where a run goes on.
"""
