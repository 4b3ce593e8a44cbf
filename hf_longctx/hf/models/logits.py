"""Finds the operations that a model applies to its logits after the head, by running the code of its class on a stand-in.

The model's own forward runs on a shell of the model, which shares its settings but computes nothing: the decoder returns a few
numbers, and the head a stand-in for logits, which records every operation on it. So no table of classes can be out of date, and
no setting is read in another way than by the class. The operations found are then tried on random logits: value and gradient
must equal those of the class's own code bit by bit, in every dtype. If a class does anything else to its logits (a bias, a choice
of columns, a learned scale), the change counts as unknown, and plans keep whole logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_longctx.hf.models.heads import head_kind, head_of, inner_model, num_outputs
from hf_longctx.runtime.activations.output_head import LogitChange, StandIn
from hf_longctx.runtime.core.binding import HOOKS

# words in names of config fields by which some class changes its logits after the head
_LOGIT_WORDS = ("logit", "softcap", "lm_head_multiplier", "output_multiplier", "unpadded_vocab_size")
# words in names of similar fields about other things: logits of attention, of a router or of a contrastive model, token counts
_OTHER_WORDS = ("attn", "attention", "router", "auxiliary", "contrastive", "init_value", "mlp", "lsd", "to_keep")
# field with the names of tokens, among them those of images, whose logits a class may hide
_TOKEN_NAMES = "vocabulary_map"
# logits on which a change is tried: number for each token, sizes and dtypes
_TRIED_LOGITS = 32
_TRIED_SIZES: tuple[float, ...] = (0.1, 3.0, 300.0)
_TRIED_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def head_problem(model: nn.Module) -> str:
    """Returns why the loss of `model` cannot be computed in tiles: an unknown change of its logits. Empty if it can be."""
    try:
        logit_change(model)
    except ValueError as error:
        return str(error)
    return ""


def logit_change(model: nn.Module) -> LogitChange:
    """The change that `model` makes to its logits after its head; raises ValueError if it makes one that is not known."""
    inner = inner_model(model)
    config = getattr(inner, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise ValueError(f"{type(inner).__name__} has no config of transformers, which would tell whether it changes its logits")
    # only language models obey such settings
    setting = _setting(config) if head_kind(inner) == "next_token" else ""
    if not setting:
        return LogitChange()
    try:
        # the code of a class may draw random numbers
        with torch.random.fork_rng(devices=[]):
            changes = [_followed(inner, is_training) for is_training in (True, False)]
            is_known = changes[0] == changes[1] and all(_is_exact(inner, changes[0], mode) for mode in (True, False))
    except Exception as error:
        # a forward that raises any error on a shell is unknown
        raise ValueError(_unknown(inner, setting)) from error
    if not is_known:
        raise ValueError(_unknown(inner, setting))
    return changes[0]


def _setting(config: PretrainedConfig) -> str:
    """Name and value of the first setting by which some class would change its logits; empty if there is none."""
    for each in {id(each): each for each in (config, config.get_text_config())}.values():
        for name, value in sorted(each.to_dict().items()):
            is_ours = any(word in name for word in _LOGIT_WORDS) and not any(word in name for word in _OTHER_WORDS)
            if is_ours and not isinstance(value, bool) and isinstance(value, int | float | str):
                return f"{name}={value}"
            if name == _TOKEN_NAMES and value:
                return name
    return ""


def _unknown(inner: nn.Module, setting: str) -> str:
    return f"{type(inner).__name__} changes its logits after the head ({setting}) by more than a known scale or cap"


def _followed(inner: nn.Module, is_training: bool) -> LogitChange:
    """The operations that the class's forward applies to a stand-in for logits."""
    given = StandIn.of(torch.zeros((), device="cpu"))
    found = _run(inner, given, is_training)
    if not isinstance(found, StandIn):
        raise ValueError(f"{type(inner).__name__} returns other logits than those of its head")
    return found.change


def _is_exact(inner: nn.Module, change: LogitChange, is_training: bool) -> bool:
    """Whether `change` gives the logits of the class's own code, and their gradients, bit by bit."""
    # once with as many logits as the model has, since some classes leave out those beyond a number, and always if it hides some
    few = num_outputs(inner) if change.hidden_ids else _TRIED_LOGITS
    tries: list[tuple[torch.dtype, int, tuple[float, ...]]] = [(dtype, few, _TRIED_SIZES) for dtype in _TRIED_DTYPES]
    tries.append((torch.float32, num_outputs(inner), _TRIED_SIZES[:1]))
    generator = torch.Generator("cpu").manual_seed(0)
    for dtype, num_logits, sizes in tries:
        shape = (1, len(sizes), num_logits)
        random_1TV, slope_1TV = torch.randn(2, *shape, generator=generator, dtype=torch.float64, device="cpu")
        random_1TV *= torch.tensor(sizes, dtype=torch.float64, device="cpu").unsqueeze(1)
        results = []
        for run in (change, lambda given: _run(inner, given, is_training)):
            given_1TV = random_1TV.to(dtype).requires_grad_()
            with torch.enable_grad():
                # a leaf cannot be changed in place
                found_1TV = run(given_1TV.clone())
                (gradient_1TV,) = torch.autograd.grad(found_1TV, given_1TV, slope_1TV.to(found_1TV.dtype))
            results.append((found_1TV.detach(), gradient_1TV))
        if any(mine.dtype != own.dtype or not torch.equal(mine, own) for mine, own in zip(*results, strict=True)):
            return False
    return True


class _Hidden:
    """Output of a decoder: hidden states; every other field is None."""

    def __init__(self, hidden_1TC: Tensor) -> None:
        self.last_hidden_state = hidden_1TC

    def __getitem__(self, key: Any) -> Any:
        return self.last_hidden_state if key == 0 else ()

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _run(inner: nn.Module, logits_1TV: Tensor, is_training: bool) -> Any:
    """Logits that the forward of the model's class returns if its head gives these logits; nothing else is computed."""
    head, shell = head_of(inner), _shell(inner)
    hidden_1TC = torch.zeros(1, logits_1TV.shape[1], 1, device="cpu")
    for name, child in inner.named_children():
        is_head = child is head
        own = _GivenHead() if is_head else _shell(child)
        vars(own)["forward"] = _returning(logits_1TV if is_head else _Hidden(hidden_1TC))
        shell._modules[name] = own
    vars(shell)["training"] = is_training
    token_ids = torch.zeros(1, logits_1TV.shape[1], dtype=torch.int64, device="cpu")
    output = type(inner).forward(shell, input_ids=token_ids, use_cache=False, return_dict=True)
    return output.logits


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **keywords: value


class _GivenHead(nn.Module):
    """Replaces an output head; some classes read the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1, device="cpu"), requires_grad=False)


def _shell(module: nn.Module) -> Any:
    """A copy of a module with its settings, but without its children, hooks and replaced forward.

    If the code of its class changes the copy, for example a counter, the module itself stays as it is.
    """
    shell = object.__new__(type(module))
    copied = {name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict | list | set)}
    vars(shell).update({**vars(module), **copied})
    vars(shell)["_buffers"] = {name: None if own is None else own.clone() for name, own in module._buffers.items()}
    vars(shell).update({"_modules": {}, "_compiled_call_impl": None, **{name: {} for name in HOOKS}})
    vars(shell).pop("forward", None)
    return shell
