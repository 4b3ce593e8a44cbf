"""Bugs to plant in the package's own functions, so that tests can show that they would notice them.

A replaced function that nobody calls shows nothing: the package may have moved it and call it by another name. So every
replacement counts its calls, and `UnusedReplacement` is raised if there were none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from hf_longctx.families.family import Modules
from hf_longctx.hf.data import collator
from hf_longctx.hf.models import attention, expert_adapters
from hf_longctx.hf.models import states as functions
from hf_longctx.hf.models import states as methods
from hf_longctx.hf.models.packed_experts import packed_weight
from hf_longctx.runtime import process_groups as pool
from hf_longctx.runtime.activations import engine
from hf_longctx.runtime.activations.output_head import LogitChange, OutputHead
from hf_longctx.runtime.attention import ring, sequence_parallel
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.kv_book import KVBook
from hf_longctx.runtime.attention.state_book import StateBook
from hf_longctx.runtime.core.dropout import DropoutKeys, DropoutTokens
from hf_longctx.runtime.core.loss import Targets
from hf_longctx.runtime.execution import executor
from hf_longctx.runtime.execution import round as host
from hf_longctx.runtime.execution import round as round_module
from hf_longctx.runtime.parameters.gradients import ReplicatedParameters
from hf_longctx.runtime.states import passing, recurrence
from hf_longctx.runtime.states import passing as messages
from hf_longctx.runtime.tiles.patterns import CAUSAL
from hf_longctx.runtime.tiles.plain import WeightDropout

# bugs that every test of equality notices; `plant` knows more
BUGS = ("loss normalised per rank", "documents leak", "labels shifted after the cut", "rounds in another order on one rank")


class UnusedReplacement(RuntimeError):
    """A test replaced a function of the package, but the package never called it."""


@contextmanager
def replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function of a module or class while the body runs; raises UnusedReplacement if it was never called.

    If the body raises, its own error is the one that leaves.
    """
    num_calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return replacement(*args, **kwargs)

    inside = vars(owner).get(name)
    if isinstance(inside, (staticmethod, classmethod)):
        counted = type(inside)(counted)
    with patch.object(owner, name, counted):
        yield
    if not num_calls:
        raise UnusedReplacement(f"nobody called {getattr(owner, '__name__', owner)}.{name}; replace what the product calls")


@contextmanager
def plant(bug: str, rank: int, num_ranks: int) -> Iterator[None]:
    """Replaces a function of the package by a wrong one while the body runs; the empty bug changes nothing."""
    if not bug:
        yield
        return
    makers: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "loss normalised per rank": lambda: _mean_per_rank(num_ranks),
        "documents leak": _one_document,
        "labels shifted after the cut": _late_shift,
        "rounds in another order on one rank": lambda: _reversed_rounds(rank),
        "positions of the shard": _own_positions,
        "frequencies of the slice": _frequencies_of_slices,
        "windows ignored": lambda: replaced(attention, "AttentionPattern", lambda **settings: CAUSAL),
        "queries scaled by their place in the row": lambda: patch.object(attention, "MODULES", Modules()),
        "neighbour's keys": _neighbours_keys,
        "neighbour's keys in rings": _neighbours_block,
        "gradients of keys and values dropped": _dropped_gradients,
        "stale book entry": _stale_entries,
        "states leak in the scan": _one_document_in_scans,
        "states leak in the convolution": lambda: _one_document_in_convolutions(functions),
        "states leak in the shift": lambda: _one_document_in_convolutions(methods),
        "states of other ranks dropped": lambda: _dropped_messages(passing),
        "tokens of other ranks dropped": lambda: _dropped_messages(messages),
        "states of slices dropped": _dropped_states,
        "states of slices damped": _damped_states,
        "gradients of states dropped": _dropped_state_gradients,
        "states between blocks dropped": lambda: _changed_between(torch.zeros_like),
        "gradients of states between blocks dropped": lambda: _changed_between(torch.Tensor.detach),
        "gradients of one rank": lambda: replaced(ReplicatedParameters, "reduce", lambda self, group, tied=None: None),
        "dropout by place in the row": _places_in_rows,
        "dropout by place in the tile": lambda: replaced(DropoutTokens, "part", _front),
        "dropout by sequence of the rank": _own_sequences,
        "dropout of replays at random": _random_replays,
        "weights dropped by the rank's own head": lambda: _weights_dropped(first_head=0),
        "weights dropped by place in the slice": lambda: replaced(WeightDropout, "of_rows", _rows_of_slices),
        "weights dropped by document of the chunk": lambda: _weights_dropped(numbers=tuple(range(100))),
        "logits of tiles left alone": _unchanged_tiles,
        "codes of another expert": lambda: replaced(expert_adapters, "packed_weight", _codes_of_the_next_expert),
        "adapters of another rank's experts": lambda: replaced(expert_adapters, "first_expert", lambda experts: 0),
        "weights dropped in another step": lambda: _weights_dropped(step=7),
    }
    with makers[bug]():
        yield


def _codes_of_the_next_expert(module: Any, name: str) -> Any:
    found = packed_weight(module, name)
    return None if found is None else replace(found, codes_ENH=found.codes_ENH.roll(1, 0))


def _unchanged_tiles() -> Any:
    original = OutputHead.__init__

    class Idle(LogitChange):
        def __call__(self, logits: torch.Tensor) -> torch.Tensor:
            return logits

    def bind(head: Any, module: Any, norm: Any = None, change: Any = None) -> None:
        original(head, module, norm, Idle(() if change is None else change.steps))

    return replaced(OutputHead, "__init__", bind)


def _places_in_rows() -> Any:
    original = DropoutKeys.of_pieces

    def of_pieces(keys: Any, pieces: Any, positions: torch.Tensor, lengths: Any = ()) -> Any:
        return original(keys, pieces, torch.arange(positions.numel()), lengths)

    return replaced(DropoutKeys, "of_pieces", of_pieces)


def _front(tokens: Any, part: slice = slice(None)) -> Any:
    size = len(tokens.positions_T[part])
    return replace(tokens, documents_T=tokens.documents_T[:size], positions_T=tokens.positions_T[:size], calls={})


def _own_sequences() -> Any:
    original = DropoutKeys.of_pieces

    def of_pieces(keys: Any, pieces: Any, positions: torch.Tensor, lengths: Any = ()) -> Any:
        return original(keys, [(count, place) for place, (count, _) in enumerate(pieces)], positions, lengths)

    return replaced(DropoutKeys, "of_pieces", of_pieces)


def _weights_dropped(**wrong: Any) -> Any:
    original = GroupContext.weight_dropout

    def weight_dropout(context: Any, rate: float, name: str, heads: Any) -> Any:
        dropout = original(context, rate, name, heads)
        return None if dropout is None else replace(dropout, **wrong)

    return replaced(GroupContext, "weight_dropout", weight_dropout)


def _rows_of_slices(dropout: Any, document: int, first_row: int) -> Any:
    return replace(dropout, document=document, first_row=0)


def _random_replays() -> Any:
    original = engine._Inside.__enter__

    def enter(inside: Any) -> None:
        if inside.is_replay:
            inside.tokens = replace(inside.tokens, step=inside.tokens.step + 1)
        original(inside)

    return replaced(engine._Inside, "__enter__", enter)


@contextmanager
def _mean_per_rank(num_ranks: int) -> Iterator[None]:
    def mean(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
        labels = targets.labels_1T
        return F.cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="sum") / (labels != -100).sum().clamp(min=1)

    with ExitStack() as both:
        both.enter_context(replaced(host, "summed_loss", mean))
        both.enter_context(replaced(round_module, "step_loss", lambda loss, count: loss / num_ranks))
        yield


def _frequencies_of_slices() -> Any:
    def ends(chunks: Any) -> dict[int, int]:
        *_, chunk = chunks
        return {span.sequence: span.num_tokens for span in chunk.spans}

    return replaced(pool, "sequence_ends", ends)


def _one_document() -> Any:
    original = pool.document_bounds

    def bounds(pieces: Any) -> tuple[int, ...]:
        return (0, original(pieces)[-1])

    return replaced(pool, "document_bounds", bounds)


def _one_document_in_scans() -> Any:
    original = recurrence.documents_of

    def documents(cu_seqlens: tuple[int, ...], slices: Any) -> Any:
        return original((0, cu_seqlens[-1]), ())

    return replaced(recurrence, "documents_of", documents)


def _one_document_in_convolutions(module: Any) -> Any:
    def convolve(x: Any, width: int, convolve: Any, layer: Any, context: Any, **_: Any) -> Any:
        return convolve(x)

    return replaced(module, "convolve_documents", convolve)


def _dropped_messages(module: Any) -> Any:
    original = module.exchange
    return replaced(module, "exchange", lambda *args: original(*args) * 0)


def _dropped_states() -> Any:
    original = StateBook.take
    return replaced(StateBook, "take", lambda book, place: original(book, place) * 0)


def _damped_states() -> Any:
    original = StateBook.put
    return replaced(StateBook, "put", lambda book, place, state, output: original(book, place, 0.99 * state, output))


def _dropped_state_gradients() -> Any:
    original = StateBook.gradient
    return replaced(StateBook, "gradient", lambda book, place: original(book, place) * 0)


def _changed_between(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    original = recurrence.in_blocks

    def in_blocks(scan: Any, *args: Any) -> Any:
        return original(lambda inputs, state: scan(inputs, None if state is None else change(state)), *args)

    return replaced(recurrence, "in_blocks", in_blocks)


def _late_shift() -> Any:
    original = collator.chunk_inputs

    def inputs(chunk: Any, group: Any, position: int, sequences: Any) -> Any:
        unshifted = {i: replace(s, shift_labels=s.input_ids) for i, s in sequences.items()}
        shard = original(chunk, group, position, unshifted)
        return replace(shard, shift_labels=collator.shift(shard.shift_labels[0]).unsqueeze(0))

    return replaced(collator, "chunk_inputs", inputs)


def _reversed_rounds(rank: int) -> Any:
    original = executor.StepExecutor.run

    def run(self: Any, plan: Any, inputs: Any, num_label_tokens: int, **settings: Any) -> Any:
        if rank == 1:
            plan, inputs = replace(plan, rounds=plan.rounds[::-1]), inputs[::-1]
        return original(self, plan, inputs, num_label_tokens, **settings)

    return replaced(executor.StepExecutor, "run", run)


def _own_positions() -> Any:
    original = collator.chunk_inputs

    def inputs(*args: Any) -> Any:
        shard = original(*args)
        return replace(shard, position_ids=torch.arange(shard.input_ids.shape[1]).unsqueeze(0))

    return replaced(collator, "chunk_inputs", inputs)


def _neighbours_keys() -> Any:
    original = sequence_parallel.join_tokens

    def joined(received: Any, tokens: Any, *sizes: Any) -> Any:
        q, k, v = original(received, tokens, *sizes)
        return q, k.roll(tokens[0], dims=1), v.roll(tokens[0], dims=1)

    return replaced(sequence_parallel, "join_tokens", joined)


def _neighbours_block() -> Any:
    original = ring._around

    def around(own: Any, where: Any, pattern: Any, compute: Any, *sums: Any) -> None:
        original(own, where, pattern, lambda block, kv: compute(block, kv if block == where.index else kv.roll(1, dims=2)), *sums)

    return replaced(ring, "_around", around)


def _dropped_gradients() -> Any:
    original = KVBook.gradients

    def gradients(self: Any, layer: Any, part: Any) -> Any:
        front, own = original(self, layer, part)
        return front, own.zero_()

    return replaced(KVBook, "gradients", gradients)


def _stale_entries() -> Any:
    original, first_step = KVBook.write, {}

    def write(book: Any, layer: Any, part: Any, k: torch.Tensor, v: torch.Tensor, **how: Any) -> Any:
        # imitate a book that outlives its step and keeps its old entries in place of the new ones
        kept = first_step.setdefault((type(layer), layer.layer_idx, part), (k.clone(), v.clone()))
        return original(book, layer, part, *kept, **how)

    return replaced(KVBook, "write", write)
