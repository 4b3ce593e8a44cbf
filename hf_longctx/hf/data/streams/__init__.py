"""Trains on iterable datasets: readers on many ranks read ahead, plans need lengths alone, and tokens go straight to ranks.

In the order of use: `sources` divides a dataset among readers, `rows` makes checked sequences of a reader's rows, `composer`
makes global batches from what readers announce and finds rows that two readers read, and `planned_stream` reads ahead in a
thread, plans, and sends tokens from readers to the ranks that hold them.
"""
