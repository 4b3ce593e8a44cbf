"""Training data: text and chats become tokens, which are checked, mixed, drawn, and cut to a plan's chunks.

In the order of use: `tokenise` and `chat` make rows of tokens, `mixture` mixes datasets, `scan` checks rows and reads their
lengths, `sampler` draws the sequences of each step, and `collator` cuts out the tokens of one rank. `streams` does all of this
for iterable datasets; `resume` continues after a checkpoint.
"""
