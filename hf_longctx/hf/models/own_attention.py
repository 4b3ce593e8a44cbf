"""Runs attention that a class writes out in its own file, without transformers' common interface, over a sequence group.

Such classes drop the plan's context on the way to their attention. So `OwnAttentionPatch` gives the model, its decoder, its
layers and its attention new forwards, each of which runs the forward of its class. Those of model and decoder take the context
and pass it to the layers; a layer passes it on as a keyword, so that a replay of the layer has it too. Attention then runs in one
of two ways: our method replaces the one that computes outputs from queries, keys and values, or it gets our cache (`GroupCache`).

Biases that grow with a token's index (ALiBi) count from the start of the row in these classes. Under a plan they are computed
from positions in documents.

With our cache, the class multiplies queries with keys, scales, adds a mask, takes the softmax and multiplies with values. First
it asks the cache for keys and values, which returns stand-ins. Operations on them give further stand-ins, which only record the
scale and the bias of every key; the product with the values then runs `sequence_parallel_attention`. Every other operation on a
stand-in raises, so that none is left out silently. A stand-in follows torch's protocol for classes that are no tensors
(`__torch_function__`).

Shapes: H query heads, G KV heads, T tokens of this rank, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_longctx.families.family import OwnAttention
from hf_longctx.families.registry import OWN_ATTENTION
from hf_longctx.hf.models.forwards import cache_parameter, carried, carrying, give, has, take, without_renames
from hf_longctx.hf.models.positions import row_positions
from hf_longctx.hf.models.towers import text_part
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.sequence_parallel import LayerCall, sequence_parallel_attention
from hf_longctx.runtime.core.binding import class_name, is_ours, is_written_by, with_globals
from hf_longctx.runtime.core.dropout import SITE, DropoutSite
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern

Role = Literal["keys", "values", "scores", "weights"]
# columns that a bias adds to queries and keys: operators need head sizes that are multiples of 8
_BIAS_COLUMNS = 8
# parts of a bias: three numbers in bf16 hold one in fp32
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
        """Attention [1, H, T, D] over all tokens that this rank's tokens see.

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
    """Stands in for a tensor of the shape of `form`, which has no data."""

    call: OwnCall
    role: Role
    form: Tensor = field(repr=False)
    dtype: torch.dtype
    # the last two dimensions are swapped
    is_turned: bool = False
    # the queries of scores and weights
    query: Tensor | None = field(default=None, repr=False)
    # scores are products of queries and keys times `scale`, plus `bias_HT`
    scale: float = 1.0
    bias_HT: Tensor | None = field(default=None, repr=False)
    # share of the weights that are dropped
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
        """The error for an operation that plans do not support."""
        return ValueError(
            f"{type(self.call.layer).__name__} applies {what} to its attention {self.role}, which plans do not know; use the "
            f"newest version of transformers that docs/models.md names"
        )

    def _moved(self, name: str, *args: Any, **keywords: Any) -> StandIn:
        """Changes the shape by a method of tensors; the last two dimensions must stay."""
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


# name of transformers' common interface in the code of forwards that call it
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# attribute of a patched model
_SERVED = "_longctx_own_attention"


_LAYERS = tuple(own.layer for own in OWN_ATTENTION.values())
_ATTENTIONS = {own.attention: own for own in OWN_ATTENTION.values()}
# methods of decoders, and functions in their modules, that make biases [H, 1, keys] for a mask, or for a number of keys
_BIASES_OF_MASK, _BIASES_OF_LENGTH = "build_alibi_tensor", "build_mpt_alibi_tensor"


def own_attention(model: nn.Module) -> OwnAttention | None:
    """Facts about a model's attention if its class writes it out itself; None for other classes.

    Newer versions of transformers have moved some of these classes to its common interface.
    """
    own = OWN_ATTENTION.get(class_name(model))
    if own is None:
        return None
    attention = next((module for module in model.modules() if class_name(module) == own.attention), None)
    return None if attention is not None and _uses_interface(attention) else own


def _uses_interface(attention: nn.Module) -> bool:
    """Whether an attention class calls the function that is registered under the name in the model's config."""
    return _INTERFACE in without_renames(type(attention).forward).__code__.co_names


def is_served(model: Any) -> bool:
    """Whether `model` is patched."""
    return isinstance(model, nn.Module) and _SERVED in vars(model)


class OwnAttentionPatch:
    """Makes attention that a class writes out itself run under plans."""

    def needed(self, model: Any) -> bool:
        """Whether the text model's class does so."""
        return own_attention(text_part(model)) is not None

    def apply(self, model: Any) -> None:
        """Raises ValueError if the model has a forward that is not its class's."""
        text = text_part(model)
        if is_served(text):
            return
        # accelerate has wrapped our forward in an earlier run
        if "forward" in vars(text) and not has(text, _model_forward):
            raise ValueError(
                f"the forward of {type(text).__name__} was replaced, so that plans would not reach its attention; remove it (del "
                f"model.forward), and if mixed precision of accelerate has done it, use LongContextTrainer or `attach`"
            )
        for module, name, function in _methods(text):
            give(module, function, name)
        vars(text)[_SERVED] = True

    def undo(self, model: Any) -> None:
        """Leaves a forward of the model that accelerate has wrapped in the meantime."""
        if self.needed(model):
            text = text_part(model)
            for module, name, function in _methods(text):
                take(module, function, name)
            vars(text).pop(_SERVED, None)


def own_attention_problems(model: Any) -> list[str]:
    """Problem with a user's method that plans would replace by their own; empty if there is none."""
    if own_attention(model) is None:
        return []
    names = {module: name for name, module in model.named_modules()}
    for module, name, _ in _methods(model):
        own = vars(module).get(name)
        is_changed = module is not model and own is not None and not is_ours(own)
        if is_changed or not is_written_by(getattr(type(module), name), "transformers", "torch"):
            return [
                f"the {name} of {names[module] or 'the model'} ({type(module).__name__}) was replaced, and plans run their own "
                f"there; remove it, or hook the module (register_forward_hook)"
            ]
    return []


def _methods(model: Any) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """Every method that a model gets: its module, its name and the function."""
    decoder = model.base_model
    yield model, "forward", _model_forward
    yield decoder, "forward", _decoder_forward
    for name, function in ((_BIASES_OF_MASK, _biases_of_mask), (_BIASES_OF_LENGTH, _biases_of_length)):
        if hasattr(type(decoder), name):
            yield decoder, name, function
    for module in decoder.modules():
        kind = class_name(module)
        if kind in _LAYERS:
            yield module, "forward", _layer_forward
        elif kind in _ATTENTIONS:
            yield (module, "forward", _attention_forward) if _ATTENTIONS[kind].takes_cache else (module, "_attn", _attn)


def _model_forward(model: Any, *args: Any, longctx: GroupContext | None = None, **keywords: Any) -> Any:
    if longctx is None:
        return type(model).forward(model, *args, **keywords)
    # these classes do not pass the context on
    with carrying([model.base_model], longctx):
        return type(model).forward(model, *args, **keywords)


def _decoder_forward(decoder: Any, *args: Any, longctx: GroupContext | None = None, **keywords: Any) -> Any:
    # a pipeline stage without the head calls the decoder itself
    context = carried(decoder) or longctx
    if context is None:
        return type(decoder).forward(decoder, *args, **keywords)
    carriers = [module for module in decoder.modules() if class_name(module) in _LAYERS]
    forward = type(decoder).forward
    if _BIASES_OF_MASK in (names := inspect.unwrap(forward).__globals__) and not hasattr(type(decoder), _BIASES_OF_MASK):
        biases = partial(_biases, context, names[_BIASES_OF_MASK])
        forward = with_globals(inspect.unwrap(forward), {_BIASES_OF_MASK: biases})
    with carrying([decoder, *carriers, *row_positions(decoder)], context):
        return forward(decoder, *args, **keywords)


def _layer_forward(layer: Any, *args: Any, **keywords: Any) -> Any:
    """The forward of a decoder layer's class, checkpointed if the class's is; attention finds the context."""
    context = carried(layer)
    if context is None:
        return type(layer).forward(layer, *args, **keywords)
    forward = partial(_class_forward, layer, longctx=context, **keywords)
    if getattr(layer, "gradient_checkpointing", False) and layer.training:
        return layer._gradient_checkpointing_func(forward, *args)
    return forward(*args)


def _class_forward(layer: nn.Module, *args: Any, longctx: GroupContext, **keywords: Any) -> Any:
    with carrying((module for module in layer.modules() if class_name(module) in _ATTENTIONS), longctx):
        # skip the wrapper of transformers that checkpoints a forward: it has already run
        return inspect.unwrap(type(layer).forward)(layer, *args, **keywords)


def _attention_forward(attention: Any, *args: Any, **keywords: Any) -> Any:
    """The forward of an attention class, with a cache that passes its keys, values and queries to plans."""
    context = carried(attention)
    if context is None:
        return type(attention).forward(attention, *args, **keywords)
    own, call = _ATTENTIONS[class_name(attention)], OwnCall(attention, context)
    parameter = cache_parameter(type(attention).forward)
    forward = type(attention).forward
    # some layers pass their arguments by place
    named = dict(list(inspect.signature(forward).bind_partial(attention, *args).arguments.items())[1:])
    given = named | keywords | {parameter: GroupCache(call)} | ({} if own.keeps_mask else {"attention_mask": None})
    output = forward(attention, **given)
    call.check()
    # weights are no tensors here
    return tuple(None if isinstance(part, StandIn) else part for part in output)


def _attn(attention: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Any:
    """Outputs [1, H, T, D] of an attention class's own method, and no weights."""
    context = carried(attention)
    if context is None:
        return type(attention)._attn(attention, query, key, value, attention_mask)
    own = _ATTENTIONS[class_name(attention)]
    is_local = getattr(attention, "attention_type", "") == "local"
    pattern = AttentionPattern(window=attention.config.window_size) if is_local else CAUSAL
    scale = 1 / getattr(attention, own.divisor) if own.divisor else 1.0
    rate = getattr(attention, own.dropout).p if attention.training else 0.0
    return OwnCall(attention, context, pattern, key, value).attend(query, scale, dropout=rate), None


def _biases_of_mask(decoder: Any, mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Biases [H, 1, T] of the class's own method, by position in a document."""
    own = partial(getattr(type(decoder), _BIASES_OF_MASK), decoder)
    context = carried(decoder)
    if mask.numel() == 1 and context is None:
        # the mask of plans, on a decoder without layers
        mask = mask.view(1, 1).long()
    found: Tensor = own(mask, num_heads, dtype) if context is None else _biases(context, own, mask, num_heads, dtype)
    return found


def _biases_of_length(decoder: Any, num_heads: int, length: int, *args: Any, **keywords: Any) -> Tensor:
    """Biases [H, 1, T] of the class's own method, by position in a document."""
    context, own = carried(decoder), partial(getattr(type(decoder), _BIASES_OF_LENGTH), decoder)
    if context is None:
        found: Tensor = own(num_heads, length, *args, **keywords)
        return found
    if (longest := _longest(context)) > length:
        raise ValueError(f"a document has {longest} tokens, but {type(decoder).__name__} makes biases for {length}; shorten it")
    # they count from the end of `length` keys, a number that is the same in every slice and on every rank
    return _by_position(own(num_heads, length, *args, **keywords), context)


def _biases(context: GroupContext, own: Callable[..., Tensor], mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    ones_1N = torch.ones(1, _longest(context), dtype=torch.int64, device=mask.device)
    return _by_position(own(ones_1N, num_heads, dtype=dtype), context)


def _longest(context: GroupContext) -> int:
    return max(whole for _, whole in context.documents)


def _by_position(bias_H1N: Tensor, context: GroupContext) -> Tensor:
    """Entries of biases by position, for this rank's tokens; a constant offset of the count does not change a softmax."""
    assert context.position_ids is not None
    return bias_H1N.index_select(-1, context.position_ids.view(-1))
