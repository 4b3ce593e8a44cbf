"""Output head and loss in token tiles, as one autograd node: logits exist for one tile at a time, forward and backward.

`hf.models.activations` binds it to a model's output head; the executor gets losses and scores from it. The norm before the head
runs in the same tiles and saves only its input.

The node runs inside the model's forward, in place of the head, so weights are gathered (sharded parameters) or wrapped (adapters)
as for the head. If u is the cost of multiplying all tokens once by the head's weight, the node costs

    3 u with `keep_gradients`: a tile's gradients are computed while its logits exist, and backward only scales them. From
        forward to backward it holds the gradient of the input [T, C], and those of the head's parameters in at least fp32.
    4 u without `keep_gradients`: backward runs the tiles again. From forward to backward it holds the head's input.
    1 u if no graph is made, and for the scores of single tokens (`scoring`).

A change that the model makes to its logits after the head, such as a scale, a cap by tanh or a cast (`LogitChange`), is made to
the logits of each tile, with the same operations in the same order and dtype; autograd gives their derivative. The model's own
forward then applies its change once more, to what the head returns in place of logits. So the head returns a `StandIn`, which
keeps the loss as it is and records each step; `OutputHead` compares these steps with those of the tiles in every forward.

The gradient of cross-entropy by a tile's logits is known in closed form; that of a user's loss comes from autograd on the tile.
Tiles without label tokens are skipped if the labels are on the host: their loss and gradients are exactly zero.

Shapes: T tokens of this rank, t tokens of a tile, C features, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_longctx.runtime.activations.token_tiles import Run, add_gradients, gradient_dtype, tiles_of, tokenwise
from hf_longctx.runtime.core.binding import bound, put
from hf_longctx.runtime.core.dropout import on_tiles
from hf_longctx.runtime.core.loss import (
    IGNORE_INDEX,
    AtTeacher,
    Scoring,
    Targets,
    TokenLoss,
    TokenScores,
    TokenTally,
    custom_losses,
    label_logits,
    summed_loss,
    token_scores,
    weighted,
    wide_logits,
)

# name of an operation, and its number, its dtype or token ids
Step = tuple[str, float | torch.dtype | tuple[int, ...] | None]

_APPLY: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda x, factor: x * factor,
    "div": lambda x, divisor: x / divisor,
    "tanh": lambda x, _: torch.tanh(x),
    "cast": lambda x, dtype: x.to(dtype),
    "hide": lambda x, ids: x.index_fill(-1, ids, torch.finfo(x.dtype).min),
}
# names of operations in torch -> names here
_NAMES = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), "mul"),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), "div"),
    "tanh": "tanh",
}
_IN_PLACE = {"mul_": "mul", "__imul__": "mul", "div_": "div", "__itruediv__": "div", "__idiv__": "div", "tanh_": "tanh"}
_CASTS = {"float": torch.float32, "double": torch.float64}
# operations that cast to a dtype argument
_CASTS_TO = ("to", "type")
_WIDE = (torch.float32, torch.float64)
# getter of a view's base tensor
_BASE = cast(Any, Tensor)._base.__get__


@dataclass(frozen=True, slots=True)
class LogitChange:
    """Operations that a model applies to each logit after its head, in order; empty if there are none."""

    steps: tuple[Step, ...] = ()
    # token ids of steps on each device, which the tiles of all losses share
    _copied: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns the changed logits."""
        for place, (name, operand) in enumerate(self.steps):
            # many configs have a scale of 1
            if operand != 1:
                given = self._on_device(place, operand, logits.device) if isinstance(operand, tuple) else operand
                logits = _APPLY[name](logits, given)
        return logits

    def _on_device(self, place: int, ids: tuple[int, ...], device: torch.device) -> Tensor:
        if (place, device) not in self._copied:
            # an evaluation may be the first to copy them
            with torch.inference_mode(False):
                self._copied[place, device] = torch.tensor(ids, device=device)
        return self._copied[place, device]

    def __str__(self) -> str:
        words = [name if operand is None else f"{name} {operand}" for name, operand in self.steps]
        return ", ".join(words).replace("torch.", "") or "no change"

    @property
    def is_cap(self) -> bool:
        """Whether logits are capped, which saves one more tensor of their size for backward."""
        return any(name == "tanh" for name, _ in self.steps)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype to which logits are cast; None if they keep the head's dtype."""
        found = [operand for _, operand in self.steps if isinstance(operand, torch.dtype)]
        return found[-1] if found else None

    @property
    def hidden_ids(self) -> tuple[int, ...]:
        """Token ids whose logits get the least number of their dtype."""
        return tuple(token for name, ids in self.steps if name == "hide" and isinstance(ids, tuple) for token in ids)

    def agrees_with(self, other: LogitChange) -> bool:
        """Whether both make the same change, except for final casts: losses are computed in a wide dtype anyway."""
        return _without_last_casts(self.steps) == _without_last_casts(other.steps)


def _without_last_casts(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    while steps and steps[-1][0] == "cast":
        steps = steps[:-1]
    return steps


class StandIn(Tensor):
    """A tensor [1, 1, 1] in place of logits: holds a value that no step changes, and the steps so far.

    Raises ValueError for operations that are no steps. newest: change of the latest stand-in.
    """

    change: LogitChange
    newest: list[LogitChange]

    @classmethod
    def of(cls, value: Tensor) -> StandIn:
        """Makes a stand-in whose value is a scalar."""
        return cls._made(value.view(1, 1, 1), LogitChange(), [LogitChange()])

    @classmethod
    def _made(cls, value_111: Tensor, change: LogitChange, newest: list[LogitChange]) -> StandIn:
        made = value_111.as_subclass(cls)
        made.change, made.newest = change, newest
        newest[0] = change
        return made

    @property
    def value(self) -> Tensor:
        """The value, a plain scalar."""
        return self._plain().view(())

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, keywords = getattr(function, "__name__", str(function)), kwargs or {}
        own = next((each for each in args if isinstance(each, StandIn)), None)
        if own is not None and (step := _step(name, [each for each in args if each is not own], keywords)) is not None:
            change = LogitChange((*own.change.steps, step))
            if name in (*_IN_PLACE, "__setitem__"):
                own.change = own.newest[0] = change
                return own
            return cls._made(own._plain(), change, own.newest)
        if name == "detach" and own is not None:
            # a hook reads the head's output: the loss, as in models that do not change their logits
            return own._plain().detach()
        if function == _BASE:
            # FSDP checks for views, whose base a change in place would change too; no step here changes a tensor
            return None
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **keywords)
        if isinstance(found, Tensor | tuple | list) and not isinstance(found, torch.Size):
            raise ValueError(
                f"the model changes its logits after the output head by {name!r}, which a loss in tiles cannot follow; set "
                f"tile_tokens=0 to keep whole logits for this model"
            )
        return found


def _step(name: str, others: list[Any], keywords: dict[str, Any]) -> Step | None:
    """Returns the step of an operation, given its arguments besides the logits; None if it is no step."""
    if name in _CASTS and not others and not keywords:
        return "cast", _CASTS[name]
    if name == "__setitem__":
        return _hiding(*others)
    if name in _CASTS_TO:
        operands = [*others, *keywords.values()]
        is_wide = len(operands) == 1 and isinstance(operands[0], torch.dtype) and operands[0] in _WIDE
        return ("cast", operands[0]) if is_wide else None
    known = _NAMES.get(name) or _IN_PLACE.get(name)
    if known is None or keywords:
        return None
    if known == "tanh":
        return None if others else ("tanh", None)
    is_number = len(others) == 1 and isinstance(others[0], int | float) and not isinstance(others[0], bool)
    return (known, others[0]) if is_number else None


def _hiding(places: Any, value: Any) -> Step | None:
    """Returns the step that gives some logits of every token the least number of their dtype; None for other changes."""
    is_whole = isinstance(places, tuple) and len(places) == 3 and places[:2] == (slice(None), slice(None))
    ids = list(places[2]) if is_whole and isinstance(places[2], list | tuple) else []
    is_least = any(value == torch.finfo(dtype).min for dtype in (*_WIDE, torch.bfloat16, torch.float16))
    return ("hide", tuple(ids)) if is_least and ids and all(isinstance(each, int) for each in ids) else None


# torch's autograd nodes that pass on a value unchanged
_PASSING = ("ToCopyBackward0", "AliasBackward0", "ViewBackward0")
# gradient of the input, gradients of the parameters (None for a parameter that the head does not use)
Gradients = tuple[Tensor, list[Tensor | None]]
_NO_CHANGE = LogitChange()


@dataclass(slots=True)
class _Order:
    """Instructions to the head for the running forward."""

    targets: Targets
    tile_tokens: int
    keep_gradients: bool = False
    # lists to fill with scores of tokens, with logits of those with labels, or with the head's inputs, and how to score
    scores: list[TokenScores] | None = None
    scoring: Scoring | None = None
    logits: list[Tensor] | None = None
    inputs: list[Tensor] | None = None
    num_calls: int = 0
    # the tensor returned in place of logits, if the model changes them
    stand_in: StandIn | None = None


class OutputHead:
    """Binds itself to the output head of one model, the module whose output is the logits; `unbind` restores it.

    Create it after adapters are added. While `summing`, the head returns the summed loss in place of logits; otherwise it runs
    unchanged. norm: norm before the head, which then runs in the same tiles; None if unknown. change: the change that the model
    makes to its logits after the head.
    """

    def __init__(self, head: nn.Module, norm: nn.Module | None = None, change: LogitChange = _NO_CHANGE) -> None:
        self.head, self.norm, self.change = head, norm, change
        self._order: _Order | None = None
        self._undo: list[Callable[[], None]] = []
        if norm is not None:
            self._bind_norm(norm)
        run = self._run = head.forward

        def forward(hidden_1TC: Tensor, *args: Any, **keywords: Any) -> Tensor:
            order = self._order
            if order is None:
                return run(hidden_1TC, *args, **keywords)
            order.num_calls += 1
            loss = _summed(head, on_tiles(head, lambda x: change(run(x, *args, **keywords))), hidden_1TC, order)
            if not change.steps:
                return loss
            order.stand_in = StandIn.of(loss)
            return order.stand_in

        self._undo.append(put(head, "forward", bound(head, forward)))

    def _bind_norm(self, norm: nn.Module) -> None:
        run = norm.forward

        def forward(x: Tensor, *args: Any, **keywords: Any) -> Any:
            order = self._order
            is_alone = x.dim() == 3 and x.shape[0] == 1 and not args and not keywords
            if order is None or not order.tile_tokens or not is_alone:
                return run(x, *args, **keywords)
            return tokenwise(norm, run, x, order.tile_tokens)

        self._undo.append(put(norm, "forward", bound(norm, forward)))

    def unbind(self) -> None:
        """Restores the forwards of head and norm."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def summing(self, targets: Targets, tile_tokens: int, keep_gradients: bool = False) -> Iterator[None]:
        """Context in which one forward of the model returns the summed loss in place of logits; `loss_of` reads it.

        The value is that of `summed_loss`, computed in tiles of `tile_tokens` tokens (0: one tile). targets: may be on the host.
        keep_gradients: compute gradients in the forward, for a backward that follows at once. Raises RuntimeError unless the
        model calls its head exactly once, and ValueError if it changes its logits in another way than the tiles.
        """
        with self._ordered(_Order(targets, tile_tokens, keep_gradients)):
            yield

    @contextmanager
    def scoring(self, shift_labels_1T: Tensor, tile_tokens: int, scoring: Scoring) -> Iterator[list[TokenScores]]:
        """Context like `summing` for a forward without gradients; fills the list with scores of the tokens."""
        scores: list[TokenScores] = []
        with self._ordered(_Order(Targets(shift_labels_1T), tile_tokens, scores=scores, scoring=scoring)):
            yield scores

    @contextmanager
    def reading(self, labels_1T: Tensor, tile_tokens: int) -> Iterator[list[Tensor]]:
        """Context like `scoring`; fills the list with the logits [n, V] of the tokens with labels."""
        logits: list[Tensor] = []
        with self._ordered(_Order(Targets(labels_1T), tile_tokens, logits=logits)):
            yield logits

    @contextmanager
    def holding(self, labels_1T: Tensor) -> Iterator[list[Tensor]]:
        """Context for one forward without gradients that does not run the head; fills the list with its input [1, T, C]."""
        inputs: list[Tensor] = []
        with self._ordered(_Order(Targets(labels_1T), 0, inputs=inputs)):
            yield inputs

    @torch.no_grad()
    def logits(self, hidden_1TC: Tensor) -> Tensor:
        """Returns the model's logits [1, T, V] of an input of its head, in its own dtype, without a graph."""
        with torch.autocast(hidden_1TC.device.type, enabled=False):
            return self.change(self._run(hidden_1TC))

    @contextmanager
    def _ordered(self, order: _Order) -> Iterator[None]:
        assert self._order is None, "the head is summing already"
        self._order = order
        try:
            yield
        finally:
            self._order = None
        if order.num_calls != 1:
            raise RuntimeError(
                f"the model called its output head {order.num_calls} times in one forward, but a tiled loss needs exactly one "
                f"call; set tile_tokens=0 to keep whole logits for this model"
            )
        if order.stand_in is not None:
            _check_change(order.stand_in.newest[0], self.change)


def _check_change(found: LogitChange, expected: LogitChange) -> None:
    if not found.agrees_with(expected):
        raise ValueError(
            f"the model changed its logits after the output head by ({found}), but the loss in tiles was computed from logits "
            f"changed by ({expected}), as the model's class does it; leave its forward and its settings as they were at the "
            f"start, or set tile_tokens=0 to keep whole logits for this model"
        )


def loss_of(returned: Tensor) -> Tensor:
    """Returns the summed loss, a scalar, from a model's output in place of logits while its head was summing.

    Raises ValueError if the model applied more than the known change, since a change meant for logits is wrong for the loss.
    This is read from the autograd graph, so a forward without a graph is not checked.
    """
    loss = returned
    if isinstance(returned, StandIn):
        _check_change(returned.change, returned.newest[0])
        loss = returned.value
    node = loss.grad_fn
    while node is not None and node.name() != _SummedLoss.__name__ + "Backward":
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            # the node belongs to a wrapper such as DDP
            if len(node.next_functions) != 1:
                return loss
        elif node.name() not in _PASSING:
            raise ValueError(
                f"the model changes its logits after the output head ({node.name()}), which a loss in tiles would leave out; "
                f"set tile_tokens=0 to keep whole logits for this model"
            )
        node = node.next_functions[0][0]
    return loss


def _summed(head: nn.Module, run: Run, hidden_1TC: Tensor, order: _Order) -> Tensor:
    targets = order.targets
    if hidden_1TC.shape[:-1] != targets.labels_1T.shape:
        raise ValueError(
            f"the output head got hidden states of shape {tuple(hidden_1TC.shape[:-1])}, but labels have shape "
            f"{tuple(targets.labels_1T.shape)}; the model must send every token to its head"
        )
    if order.inputs is not None:
        order.inputs.append(hidden_1TC)
        return hidden_1TC.new_zeros(())
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    tiles = _labelled_tiles(targets.labels_1T, order.tile_tokens or hidden_1TC.shape[1])
    labels_1T, weights_1T = (
        None if each is None else each.to(hidden_1TC.device, non_blocking=True)
        for each in (targets.labels_1T, targets.weights_1T)
    )
    assert labels_1T is not None
    if order.scores is not None and order.scoring is not None:
        order.scores.append(_scores_of_tiles(hidden_1TC, labels_1T, run, tiles, order.scoring))
        return order.scores[-1].losses_T.sum()
    if order.logits is not None:
        with torch.no_grad():
            found = [label_logits(run(hidden_1TC[:, tile], tile), labels_1T[:, tile]) for tile in tiles]
        order.logits.append(torch.cat(found))
        return found[0].new_zeros(())
    keeps = order.keep_gradients and torch.is_grad_enabled()
    tiled = _Tiled(run, tiles, parameters=tuple(parameters), token_loss=targets.token_loss, tally=targets.tally)
    loss: Tensor = _SummedLoss.apply(hidden_1TC, labels_1T, weights_1T, tiled, keeps, *parameters)
    return loss


def _labelled_tiles(shift_labels_1T: Tensor, tile_tokens: int) -> tuple[slice, ...]:
    """Returns the tiles with label tokens, or the first if none has any; all tiles for labels on a device, to avoid a wait."""
    tiles = tuple(tiles_of(0, shift_labels_1T.shape[1], tile_tokens))
    if shift_labels_1T.device.type != "cpu":
        return tiles
    return tuple(tile for tile in tiles if bool((shift_labels_1T[:, tile] != IGNORE_INDEX).any())) or tiles[:1]


@dataclass(frozen=True, slots=True)
class _Tiled:
    """A head and a loss to run in tiles: the head's own forward, its trained parameters, and a loss (None: cross-entropy).

    tally: counts the tokens of each tile.
    """

    run: Run
    tiles: tuple[slice, ...]
    parameters: tuple[nn.Parameter, ...]
    token_loss: TokenLoss | None
    tally: TokenTally | None

    def targets(self, labels_1T: Tensor, weights_1T: Tensor | None, tile: slice) -> Targets:
        """Returns the targets of a tile's tokens."""
        weights_1t = None if weights_1T is None else weights_1T[:, tile]
        token_loss = self.token_loss.cut(tile) if isinstance(self.token_loss, AtTeacher) else self.token_loss
        return Targets(labels_1T[:, tile], weights_1t, token_loss, self.tally)


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_1TC: Tensor, labels_1T: Tensor, weights_1T: Tensor | None, tiled: _Tiled, keeps: bool, *_: nn.Parameter
    ) -> Tensor:
        device = x_1TC.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        # a backward that runs tiles again would count their tokens twice
        ctx.tiled = replace(tiled, tally=None)
        ctx.keeps = keeps and any(ctx.needs_input_grad)
        if not ctx.keeps:
            ctx.save_for_backward(x_1TC, labels_1T, *(() if weights_1T is None else (weights_1T,)))
            return _loss_of_tiles(x_1TC, labels_1T, weights_1T, tiled)
        loss, (dx_1TC, sums) = _gradients_of_tiles(x_1TC, labels_1T, weights_1T, tiled)
        ctx.save_for_backward(dx_1TC, *sums)
        return loss

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tiled: _Tiled = ctx.tiled
        if ctx.keeps:
            dx_1TC, *sums = ctx.saved_tensors
        else:
            x_1TC, labels_1T, *weights = ctx.saved_tensors
            weights_1T = weights[0] if weights else None
            # backward does not restore autocast by itself
            device, dtype, is_enabled = ctx.autocast
            with torch.autocast(device, dtype, is_enabled):
                _, (dx_1TC, sums) = _gradients_of_tiles(x_1TC, labels_1T, weights_1T, tiled)
        gradients = (_scaled(total, slope, gradient_dtype(p)) for total, p in zip(sums, tiled.parameters, strict=True))
        return _scaled(dx_1TC, slope, dx_1TC.dtype), None, None, None, None, *gradients


def _scaled(total: Tensor | None, slope: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns total * slope, rounded once to `dtype`; `total` stays intact for a second backward."""
    return None if total is None else torch.mul(total, slope, out=torch.empty_like(total, dtype=dtype))


def _loss_of_tiles(x_1TC: Tensor, labels_1T: Tensor, weights_1T: Tensor | None, tiled: _Tiled) -> Tensor:
    losses = [_loss_of_tile(tiled.run(x_1TC[:, tile], tile), tiled.targets(labels_1T, weights_1T, tile)) for tile in tiled.tiles]
    return torch.stack(losses).sum()


def _loss_of_tile(logits_1tV: Tensor, targets: Targets) -> Tensor:
    if targets.token_loss is not None:
        return summed_loss(logits_1tV, targets)
    if targets.tally is not None:
        targets.tally.add(logits_1tV, targets.labels_1T)
    return _tile_loss(_log_softmax(logits_1tV), *_index(targets.labels_1T), targets.weights_1T)


@torch.no_grad()
def _scores_of_tiles(x_1TC: Tensor, labels_1T: Tensor, run: Run, tiles: tuple[slice, ...], scoring: Scoring) -> TokenScores:
    losses_T, entropies_T = torch.zeros(2, labels_1T.shape[1], dtype=torch.float64, device=labels_1T.device)
    # tiles without labels are left out
    likeliest_T = torch.full_like(losses_T, IGNORE_INDEX, dtype=torch.int64)
    is_right_T = torch.zeros_like(losses_T, dtype=torch.bool)
    extras_2T = losses_T.new_zeros(2, len(losses_T) if scoring.with_extras else 0)
    for tile in tiles:
        scores = token_scores(run(x_1TC[:, tile], tile), labels_1T[:, tile], scoring)
        losses_T[tile], likeliest_T[tile] = scores.losses_T, scores.likeliest_T
        is_right_T[tile], entropies_T[tile] = scores.is_right_T, scores.entropies_T
        if scoring.with_extras:
            extras_2T[:, tile] = scores.extras_2T
    return TokenScores(losses_T, likeliest_T, is_right_T, entropies_T, extras_2T)


def _gradients_of_tiles(x_1TC: Tensor, labels_1T: Tensor, weights_1T: Tensor | None, tiled: _Tiled) -> tuple[Tensor, Gradients]:
    """Returns loss and gradients; gradients of parameters are summed over tiles in at least fp32."""
    dx_1TC = torch.zeros_like(x_1TC)
    sums: list[Tensor | None] = [None] * len(tiled.parameters)
    losses = []
    for tile in tiled.tiles:
        x = x_1TC[:, tile].detach().requires_grad_(True)
        with torch.enable_grad():
            logits_1tV = tiled.run(x, tile)
        # unlike the tensor, the edge does not keep the logits alive
        edge, like, shape = get_gradient_edge(logits_1tV), logits_1tV.dtype, logits_1tV.shape
        targets, logits_1tV = tiled.targets(labels_1T, weights_1T, tile), logits_1tV.detach()
        if targets.tally is not None:
            targets.tally.add(logits_1tV, targets.labels_1T)
        loss, slope_tV = _slope_by_autograd(logits_1tV, targets) if tiled.token_loss else _closed_form(logits_1tV, targets)
        del logits_1tV
        losses.append(loss)
        # autograd runs backward without autocast
        with torch.autocast(x.device.type, enabled=False):
            slope_1tV = slope_tV.to(like).view(shape)
            del slope_tV
            dx_1TC[:, tile] = add_gradients(sums, x, edge, tiled.parameters, slope_1tV)
        # free before the next tile's logits are computed
        del slope_1tV
    return torch.stack(losses).sum(), (dx_1TC, sums)


def _closed_form(logits_1tV: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Returns the summed cross-entropy of a tile and its gradient with respect to the logits [t, V]."""
    log_p_tV = _log_softmax(logits_1tV)
    index_t1, is_label_t = _index(targets.labels_1T)
    loss = _tile_loss(log_p_tV, index_t1, is_label_t, targets.weights_1T)
    slope_tV = _tile_slope(log_p_tV, index_t1, is_label_t)
    if targets.weights_1T is not None:
        slope_tV.mul_(targets.weights_1T.reshape(-1, 1).to(slope_tV.dtype))
    return loss, slope_tV


def _slope_by_autograd(logits_1tV: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Returns the summed loss of a tile by the user's function, and its gradient with respect to the logits [t, V]."""
    assert targets.token_loss is not None
    logits_tV, labels_t = wide_logits(logits_1tV).requires_grad_(True), targets.labels_1T.reshape(-1)
    with torch.enable_grad():
        loss = weighted(custom_losses(targets.token_loss, logits_tV, labels_t), targets.weights_1T).sum()
    (slope_tV,) = torch.autograd.grad(loss, logits_tV)
    return loss.detach(), slope_tV.masked_fill_((labels_t == IGNORE_INDEX).unsqueeze(1), 0.0)


def _index(labels_1t: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the label of each token [t, 1], 0 if it has none, and whether it has one [t]."""
    labels_t = labels_1t.reshape(-1)
    is_label_t = labels_t != IGNORE_INDEX
    return labels_t.where(is_label_t, 0).unsqueeze(1), is_label_t


def _log_softmax(logits_1tV: Tensor) -> Tensor:
    """Returns log-probabilities [t, V] in at least fp32."""
    return F.log_softmax(wide_logits(logits_1tV), dim=-1)


def _tile_loss(log_p_tV: Tensor, index_t1: Tensor, is_label_t: Tensor, weights_1t: Tensor | None) -> Tensor:
    losses_t = (-log_p_tV.gather(1, index_t1).squeeze(1)).where(is_label_t, 0)
    return weighted(losses_t, weights_1t).sum()


def _tile_slope(log_p_tV: Tensor, index_t1: Tensor, is_label_t: Tensor) -> Tensor:
    """Returns the gradient with respect to the logits: probabilities, minus one at the label. Overwrites `log_p_tV`."""
    slope_tV = log_p_tV.exp_()
    slope_tV.scatter_add_(1, index_t1, slope_tV.new_full(index_t1.shape, -1.0))
    if slope_tV.device.type == "cpu":
        # few rows have no label, and a mask would read all rows; on a device, their number would have to be waited for
        return slope_tV.index_fill_(0, is_label_t.logical_not().nonzero().squeeze(1), 0.0)
    return slope_tV.masked_fill_(~is_label_t.unsqueeze(1), 0.0)
