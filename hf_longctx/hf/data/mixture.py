"""Mixes several tokenised datasets by weight into one, and holds out documents for evaluation. Called by the recipes.

The weights, divided by their sum, are the datasets' shares of the documents in the mix. Let dataset i have N_i documents and
the weight w_i, and give n_i documents to the mix. "first_exhausted" makes the largest mix in these shares that takes no
document twice: n_i = floor(w_i * min_j(N_j / w_j)). "all_exhausted" makes the smallest mix that holds every document:
n_i = ceil(w_i * max_j(N_j / w_j)). A dataset with a smaller N_j / w_j than the largest then repeats its documents, each equally
often or once more. Without weights the mix is every document once.
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

# tolerance for floating-point errors: a product that should be a whole number must not lose or gain a document
_ROUNDING = 1e-9


def mixture_counts(sizes: Sequence[int], weights: Sequence[float] | None, stopping: Stopping = "first_exhausted") -> list[int]:
    """Returns the number of documents that each dataset gives to the mix.

    Raises DataError for a weight that is not positive, or so small that its dataset would give no document.
    """
    if weights is None:
        return list(sizes)
    for weight in weights:
        if not (weight > 0 and math.isfinite(weight)):
            raise DataError(
                f"a dataset has the weight {weight}, expected a positive number; leave the dataset out rather than give 0"
            )
    room = [size / weight for size, weight in zip(sizes, weights, strict=True)]
    if stopping == "first_exhausted":
        counts = [math.floor(weight * min(room) + _ROUNDING) for weight in weights]
    else:
        counts = [math.ceil(weight * max(room) - _ROUNDING) for weight in weights]
    if 0 in counts:
        number = counts.index(0)
        raise DataError(
            f"weight {weights[number]} of dataset {number} is too small to give a document in a mix of {sum(counts)}; raise it, "
            f"give the smallest dataset more documents, or use all_exhausted"
        )
    return counts


def mix_datasets(
    sets: Sequence[Dataset], weights: Sequence[float] | None = None, *, stopping: Stopping = "first_exhausted", seed: int = 0
) -> Dataset:
    """Mixes tokenised datasets by weight and shuffles the result; the same seed gives the same mix.

    The seed also draws which documents of a dataset are taken. If only some datasets have `labels`, the others get their
    tokens as labels.
    """
    generator = random.Random(seed)
    chosen: list[int] = []
    first = 0
    for dataset, count in zip(sets, mixture_counts([len(each) for each in sets], weights, stopping), strict=True):
        order = list(range(first, first + len(dataset)))
        generator.shuffle(order)
        num_passes, rest = divmod(count, len(dataset))
        chosen += order * num_passes + order[:rest]
        first += len(dataset)
    generator.shuffle(chosen)
    return concatenated(sets).select(chosen)


def concatenated(sets: Sequence[Dataset]) -> Dataset:
    """Concatenates tokenised datasets; if any of them has labels, all rows get labels."""
    has_labels = any("labels" in dataset.column_names for dataset in sets)
    return datasets.concatenate_datasets([uniform(dataset, has_labels) for dataset in sets])


def held_out_counts(total: int, sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Returns the number of held-out documents of each dataset, in the shares of the mix, rounded by largest remainder.

    Raises DataError if a dataset would keep no document to train on.
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
                f"a dataset has {size} documents and {count} of them would be held out, which leaves none to train on; lower "
                f"eval_documents or give more documents"
            )
    return counts


def without_copies(train: Dataset, held_out: Dataset) -> Dataset:
    """Drops rows of `train` that have exactly the tokens of a row of `held_out`."""
    known = set(_row_digests(held_out))
    kept = [row for row, digest in enumerate(_row_digests(train)) if digest not in known]
    if not kept:
        raise DataError(
            f"all {len(train)} training documents are also held out for evaluation, so there is nothing left to learn from; "
            f"give eval_dataset other documents"
        )
    return train if len(kept) == len(train) else train.select(kept)


def _row_digests(dataset: Dataset) -> Iterator[bytes]:
    for table in dataset.select_columns(["input_ids"]).with_format("arrow").iter(1000):
        for ids in table["input_ids"]:
            yield hashlib.blake2b(ids.values.to_numpy().astype(np.int64).tobytes(), digest_size=16).digest()
