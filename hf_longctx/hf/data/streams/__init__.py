"""Iterable datasets: readers on many ranks read ahead, plans are made from lengths, and tokens are sent to their ranks.

In the order of use: `sources` divides a dataset among readers, `rows` makes checked sequences of a reader's rows, `composer`
makes global batches from announced lengths and detects rows that two readers read, and `planned_stream` reads ahead in a
thread, plans, and sends tokens from readers to the ranks that need them.
"""
