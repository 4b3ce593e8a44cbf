"""Stand-ins for keys, scores and attention weights, by which attention that a class writes out runs over a sequence group.

Such a class multiplies queries with keys, scales, adds a mask, takes the softmax and multiplies with values. It asks the cache
for keys and values first, and ours (`GroupCache`) returns stand-ins. What is computed with them gives further stand-ins, which
only note the scale and the bias of every key; the product with the values then runs `sequence_parallel_attention`. Every other
operation on a stand-in raises, so nothing is left out silently.

A stand-in follows torch's protocol for classes that are no tensors (`__torch_function__`).

Shapes: H query heads, G KV heads, T tokens of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.sequence_parallel import LayerCall, sequence_parallel_attention
from hf_longctx.runtime.core.dropout import SITE, DropoutSite
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern

Role = Literal["keys", "values", "scores", "weights"]
# columns that a bias adds to queries and keys: operators want head sizes that are multiples of 8
_BIAS_COLUMNS = 8
# parts of a bias: three of bf16 hold what one of fp32 does
_PARTS = 3


@dataclass
class OwnCall:
    """One call of an attention layer under a plan, with the keys [1, G, T, D] and values that the layer made.

    num_runs: how often it attended.
    """

    layer: nn.Module
    context: GroupContext
    pattern: AttentionPattern = CAUSAL
    keys: Tensor | None = None
    values: Tensor | None = None
    num_runs: int = 0

    def attend(self, query_1HTD: Tensor, scale: float, bias_HT: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        """Attention [1, H, T, D] over all tokens that this rank's see.

        bias_HT: added to the scores of every key. dropout: share of the weights that are dropped.
        """
        assert self.keys is not None and self.values is not None
        self.num_runs += 1
        query, keys, values = query_1HTD, self.keys, self.values
        if bias_HT is not None:
            query, keys = _with_bias(query, keys, bias_HT / scale, values.dtype)
            values = values.repeat_interleave(keys.shape[1] // values.shape[1], dim=1)
        site: DropoutSite | None = vars(self.layer).get(SITE)
        if dropout and site is None:
            raise ValueError(
                f"{type(self.layer).__name__} drops attention weights at a rate of {dropout}, but its config did not say so when "
                f"the run started; set the rate in the config before the trainer is made"
            )
        call = LayerCall(scale, self.layer, self.pattern, dropout=dropout, name=site.name if site is not None else "")
        return sequence_parallel_attention(query, keys, values, call, self.context).transpose(1, 2)

    def check(self) -> None:
        """Raises RuntimeError unless the layer attended once."""
        if self.num_runs != 1:
            raise RuntimeError(
                f"{type(self.layer).__name__} attended {self.num_runs} times in one forward, not once; use the newest version of "
                f"transformers that docs/models.md names"
            )


def _with_bias(query_1HTD: Tensor, key_1GTD: Tensor, bias_HT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries and keys of all heads, with columns whose products are `bias_HT`, in parts that `dtype` holds exactly."""
    num_heads = bias_HT.shape[0]
    key_1HTD = key_1GTD.repeat_interleave(num_heads // key_1GTD.shape[1], dim=1)
    columns, rest_HT = [], bias_HT.detach()
    for _ in range(_PARTS):
        columns.append(rest_HT.to(dtype).to(bias_HT.dtype))
        rest_HT = rest_HT - columns[-1]
    empty_HT = torch.zeros_like(bias_HT)
    bias_1HTC = torch.stack([*columns, *[empty_HT] * (_BIAS_COLUMNS - _PARTS)], dim=-1).unsqueeze(0)
    ones_1HTC = torch.ones_like(bias_1HTC)
    return (
        torch.cat([query_1HTD, ones_1HTC.to(query_1HTD.dtype)], dim=-1),
        torch.cat([key_1HTD, bias_1HTC.to(key_1HTD.dtype)], dim=-1),
    )


class GroupCache:
    """Stands in for a cache of transformers in one call of an attention layer."""

    def __init__(self, call: OwnCall) -> None:
        self._call = call

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[StandIn, StandIn]:
        """Takes the layer's keys and values of this rank's tokens; returns stand-ins for those of the whole documents."""
        self._call.keys, self._call.values = keys, values
        return StandIn(self._call, "keys", _like(keys), keys.dtype), StandIn(self._call, "values", _like(values), values.dtype)

    def get_seq_length(self, *_: Any) -> int:
        """0: the cache holds no earlier tokens."""
        return 0


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, device="meta")


@dataclass(frozen=True, eq=False)
class StandIn:
    """Stands in for a tensor of the shape of `form`, which has no data.

    is_turned: the last two dimensions are swapped. query: the queries of scores and weights. scale, bias_HT: scores are products
    of queries and keys times `scale`, plus `bias_HT`. dropout: share of the weights that are dropped.
    """

    call: OwnCall
    role: Role
    form: Tensor = field(repr=False)
    dtype: torch.dtype
    is_turned: bool = False
    query: Tensor | None = field(default=None, repr=False)
    scale: float = 1.0
    bias_HT: Tensor | None = field(default=None, repr=False)
    dropout: float = 0.0

    @property
    def shape(self) -> torch.Size:
        return self.form.shape

    @property
    def device(self) -> torch.device:
        assert self.call.values is not None
        return self.call.values.device

    def size(self, dim: int | None = None) -> Any:
        """Shape, or the size of one dimension, as of a tensor."""
        return self.form.size() if dim is None else self.form.size(dim)

    def dim(self) -> int:
        """Number of dimensions."""
        return self.form.dim()

    def _as(self, **changes: Any) -> StandIn:
        return replace(self, **changes)

    def refuse(self, what: str) -> ValueError:
        """The error for an operation that plans do not know."""
        return ValueError(
            f"{type(self.call.layer).__name__} applies {what} to its attention {self.role}, which plans do not know; use the "
            f"newest version of transformers that docs/models.md names"
        )

    def _moved(self, name: str, *args: Any, **keywords: Any) -> StandIn:
        """Another shape with the same last two dimensions."""
        form = getattr(self.form, name)(*args, **keywords)
        if form.shape[-2:] != self.shape[-2:]:
            raise self.refuse(f"{name}{args}")
        return self._as(form=form)

    def view(self, *shape: Any) -> StandIn:
        """Changes the shape; the last two dimensions must stay."""
        return self._moved("view", *shape)

    def reshape(self, *shape: Any) -> StandIn:
        """Changes the shape; the last two dimensions must stay."""
        return self._moved("reshape", *shape)

    def transpose(self, first: int, second: int) -> StandIn:
        """Swaps two dimensions: the last two of keys."""
        dims = {first % self.dim(), second % self.dim()}
        if self.role != "keys" or dims != {self.dim() - 1, self.dim() - 2}:
            raise self.refuse(f"transpose({first}, {second})")
        return self._as(form=self.form.transpose(-1, -2), is_turned=not self.is_turned)

    def contiguous(self) -> StandIn:
        """Returns itself."""
        return self

    def to(self, *args: Any, **keywords: Any) -> StandIn:
        """Changes the dtype; plans compute scores in fp32 at least."""
        dtypes = [each for each in (*args, *keywords.values()) if isinstance(each, torch.dtype)]
        if len(dtypes) != len(args) + len(keywords):
            raise self.refuse(f"to{args}")
        return self._as(dtype=dtypes[0]) if dtypes else self

    def double(self) -> StandIn:
        """Changes the dtype to fp64, to which tests widen everything."""
        return self._as(dtype=torch.float64)

    def _scaled(self, factor: Any) -> StandIn:
        if self.role != "scores" or not isinstance(factor, int | float):
            raise self.refuse("a product")
        return self._as(scale=self.scale * factor, bias_HT=None if self.bias_HT is None else self.bias_HT * factor)

    def __matmul__(self, other: Any) -> Any:
        return _product(self, other)

    def __mul__(self, factor: Any) -> StandIn:
        return self._scaled(factor)

    def __truediv__(self, divisor: Any) -> StandIn:
        return self._scaled(1 / divisor) if isinstance(divisor, int | float) else self._scaled(divisor)

    def __add__(self, bias: Any) -> StandIn:
        if self.role != "scores" or not isinstance(bias, Tensor):
            raise self.refuse("a sum")
        # one number for all keys changes no weight
        return self if bias.numel() == 1 else self._biased(bias)

    __radd__ = __add__

    def _biased(self, bias: Tensor, factor: float = 1.0) -> StandIn:
        assert self.query is not None
        num_heads, num_tokens = self.query.shape[1], self.shape[-1]
        if (
            bias.requires_grad
            or bias.shape[-2] != 1
            or bias.shape[-1] != num_tokens
            or bias.numel() not in (num_tokens, num_heads * num_tokens)
        ):
            raise self.refuse(f"a mask of shape {tuple(bias.shape)}")
        wide = torch.promote_types(bias.dtype, torch.float32)
        bias_HT = bias.reshape(-1, num_tokens).expand(num_heads, -1).to(wide) * factor
        return self._as(bias_HT=bias_HT if self.bias_HT is None else self.bias_HT + bias_HT)

    def float(self) -> StandIn:
        """Changes the dtype to fp32."""
        return self._as(dtype=torch.float32)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(getattr(function, "__name__", ""))
        found = next(each for each in (*args, *(kwargs or {}).values()) if isinstance(each, StandIn))
        if handler is None:
            raise found.refuse(getattr(function, "__name__", str(function)))
        return handler(*args, **(kwargs or {}))


def _product(left: Any, right: Any, **_: Any) -> Any:
    """Scores of queries and keys, or the output of weights and values."""
    if isinstance(left, StandIn) and isinstance(right, StandIn) and (left.role, right.role) == ("weights", "values"):
        return _attended(left, (*left.shape[:-1], right.shape[-1]))
    if isinstance(left, Tensor) and isinstance(right, StandIn) and right.role == "keys" and right.is_turned:
        form = torch.matmul(torch.empty(left.shape, device="meta"), right.form)
        query = left.unsqueeze(0) if left.dim() == 3 else left
        return right._as(role="scores", form=form, is_turned=False, query=query)
    raise (left if isinstance(left, StandIn) else right).refuse("a product")


def _attended(weights: StandIn, shape: tuple[int, ...]) -> Tensor:
    assert weights.query is not None
    return weights.call.attend(weights.query, weights.scale, weights.bias_HT, weights.dropout).reshape(shape)


def _softmax(scores: Any, dim: int | None = None, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> StandIn:
    if scores.role != "scores" or dim not in (-1, scores.dim() - 1):
        raise scores.refuse(f"softmax over dimension {dim}")
    weights: StandIn = scores._as(role="weights", dtype=dtype or scores.dtype)
    return weights


def _dropout(weights: Any, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> StandIn:
    if weights.role != "weights" or weights.dropout:
        raise weights.refuse(f"dropout {p}")
    dropped: StandIn = weights._as(dropout=float(p) if training else 0.0)
    return dropped


def _biased_product(bias: Any, batch1: Any, batch2: Any, *, beta: float = 1.0, alpha: float = 1.0) -> StandIn:
    scores: StandIn = _product(batch1, batch2) * alpha
    return scores._biased(bias, beta)


def _sum(left: Any, right: Any, **_: Any) -> Any:
    return left + right if isinstance(left, StandIn) else right + left


def _whole(
    query: Any,
    keys: Any,
    values: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """Attention by torch's own function."""
    scores = _product(query, keys.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores + attn_mask
    attended: Tensor = _product(_dropout(_softmax(scores, -1), dropout_p), values)
    return attended


_HANDLERS: dict[str, Callable[..., Any]] = {
    "matmul": _product,
    "__matmul__": _product,
    "bmm": _product,
    "baddbmm": _biased_product,
    "softmax": _softmax,
    "dropout": _dropout,
    "add": _sum,
    "__add__": _sum,
    "scaled_dot_product_attention": _whole,
}
