"""Several tokenised datasets to one: mixed by weight, with documents held out that are in no training set.

A weight is a dataset's share of the documents of the mix, after division by the sum of all weights. With "first_exhausted"
the mix is the largest one in these shares that takes no document twice: n_i = floor(w_i * min_j(N_j / w_j)). With
"all_exhausted" it is the smallest one that holds every document: n_i = ceil(w_i * max_j(N_j / w_j)), where the documents of
the other datasets repeat, each as often as any other of its dataset or once more. Without weights it is all documents once.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from typing import Literal

import datasets
import numpy as np
from datasets import Dataset

from hf_longctx.hf.data.chat import DataError
from hf_longctx.hf.data.tokenise import uniform

Stopping = Literal["first_exhausted", "all_exhausted"]

# keeps a product that is a whole number but for rounding from losing or gaining a document
_ROUNDING = 1e-9


def mixture_counts(sizes: Sequence[int], weights: Sequence[float] | None, stopping: Stopping = "first_exhausted") -> list[int]:
    """Documents that each dataset gives to the mix.

    Raises DataError for a weight that is not positive, and for one so small that its dataset would give nothing.
    """
    if weights is None:
        return list(sizes)
    for weight in weights:
        if not (weight > 0 and math.isfinite(weight)):
            raise DataError(f"a dataset has the weight {weight}, expected a positive number; leave the dataset out instead of 0")
    room = [size / weight for size, weight in zip(sizes, weights, strict=True)]
    if stopping == "first_exhausted":
        counts = [math.floor(weight * min(room) + _ROUNDING) for weight in weights]
    else:
        counts = [math.ceil(weight * max(room) - _ROUNDING) for weight in weights]
    if 0 in counts:
        number = counts.index(0)
        raise DataError(
            f"weight {weights[number]} of dataset {number} gives no document in a mix of {sum(counts)}; raise it, give the "
            f"smallest dataset more documents, or use all_exhausted"
        )
    return counts


def mix_datasets(
    sets: Sequence[Dataset], weights: Sequence[float] | None = None, *, stopping: Stopping = "first_exhausted", seed: int = 0
) -> Dataset:
    """Tokenised datasets mixed by weight and shuffled; the same seed gives the same mix.

    Which documents of a dataset are taken is drawn by the seed. A set without `labels` gets its tokens as labels if
    another one has labels.
    """
    generator = random.Random(seed)
    chosen: list[int] = []
    first = 0
    for part, count in zip(sets, mixture_counts([len(part) for part in sets], weights, stopping), strict=True):
        order = list(range(first, first + len(part)))
        generator.shuffle(order)
        num_passes, rest = divmod(count, len(part))
        chosen += order * num_passes + order[:rest]
        first += len(part)
    generator.shuffle(chosen)
    return concatenated(sets).select(chosen)


def concatenated(sets: Sequence[Dataset]) -> Dataset:
    """All rows of tokenised datasets, with labels in all of them or in none."""
    has_labels = any("labels" in part.column_names for part in sets)
    return datasets.concatenate_datasets([uniform(part, has_labels) for part in sets])


def held_out_counts(total: int, sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """How many of `total` held-out documents each dataset gives: in the shares of the mix, by largest remainder.

    Raises DataError where a dataset would keep no document to train on.
    """
    shares = [float(share) for share in (sizes if weights is None else weights)]
    exact = [total * share / sum(shares) for share in shares]
    counts = [math.floor(value + _ROUNDING) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    for size, count in zip(sizes, counts, strict=True):
        if count >= size:
            raise DataError(
                f"{size} documents are left, {count} are to be held out and the rest trained on; lower "
                f"eval_documents or give more documents"
            )
    return counts


def without_copies(train: Dataset, held_out: Dataset) -> Dataset:
    """The rows of `train` whose tokens are not, one for one, those of a row of `held_out`."""
    known = set(_row_digests(held_out))
    kept = [row for row, digest in enumerate(_row_digests(train)) if digest not in known]
    if not kept:
        raise DataError(
            f"all {len(train)} training documents are held out too, so there is nothing to learn; give other documents to "
            f"eval_dataset"
        )
    return train if len(kept) == len(train) else train.select(kept)


def _row_digests(dataset: Dataset) -> Iterator[bytes]:
    for table in dataset.select_columns(["input_ids"]).with_format("arrow").iter(1000):
        for ids in table["input_ids"]:
            yield hashlib.blake2b(ids.values.to_numpy().astype(np.int64).tobytes(), digest_size=16).digest()
