"""Lets the dropout modules of one model draw masks by token (`runtime.dropout`); no module of torch or peft is changed.

`models.attention.patch_model` binds these functions to every `nn.Dropout` that drops something, among them those of LoRA's
adapters. Rates are torch's, masks are not. In evaluation nothing is dropped. A forward without a plan drops as torch does, except
while a training under plans is under way, since its masks would then depend on the plan.

Masks follow tokens only if the module gets all tokens of a forward, or of one tile, in order. Dropout of attention weights,
functional dropout in a layer and dropout on tokens that were sorted by experts is refused by name.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.runtime.dropout.keys import SITE, DropoutKeys, DropoutSite, keys_of

# fields of a config whose dropout is all in modules that see hidden states; the tests run each of them
KEYED_FIELDS: dict[str, tuple[str, ...]] = {
    "ElectraForCausalLM": ("hidden_dropout_prob",),
    "ErnieForCausalLM": ("hidden_dropout_prob",),
    "GPTBigCodeForCausalLM": ("resid_pdrop", "embd_pdrop"),
    "GPTNeoXForCausalLM": ("hidden_dropout",),
    "ModernBertDecoderForCausalLM": ("embedding_dropout", "mlp_dropout"),
    "PersimmonForCausalLM": ("hidden_dropout",),
    "Phi3ForCausalLM": ("resid_pdrop",),
    "PhiForCausalLM": ("resid_pdrop", "embd_pdrop"),
    "RoCBertForCausalLM": ("hidden_dropout_prob",),
    "StableLmForCausalLM": ("hidden_dropout",),
}


def key_dropouts(model: nn.Module) -> None:
    """Gives every dropout module of `model` masks by token. Idempotent; all runs of a model share its keys."""
    keys = keys_of(model) or DropoutKeys()
    for name, module in _dropouts(model):
        vars(module)[SITE] = DropoutSite(keys, name)
        # a plain method, so that it works on a copy of the model too
        vars(module)["forward"] = MethodType(forward, module)


def release_dropouts(model: nn.Module) -> None:
    """Undoes `key_dropouts`. Idempotent."""
    for module in model.modules():
        if vars(module).pop(SITE, None) is not None:
            vars(module).pop("forward", None)


def check_rates(model: nn.Module) -> None:
    """Raises ValueError for a dropout module whose rate was raised from 0 since the start of the run."""
    if late := [name for name, module in _dropouts(model) if SITE not in vars(module)]:
        raise ValueError(
            f"dropout {late[0]} drops now, but dropped nothing when the run started, so its masks would depend on the plan; set "
            f"its rate before the trainer is made"
        )


def dropout_problems(model: nn.Module) -> list[str]:
    """Why masks of dropout modules cannot follow tokens, by module; empty if they can."""
    problems = []
    named, seen = dict(base_of(model).named_modules(remove_duplicate=False)), dict[int, str]()
    for name, module in named.items():
        if not isinstance(module, _DropoutNd) or not module.p:
            continue
        parents = [named[name[:place]] for place, letter in enumerate(name) if letter == "."]
        if type(module) is not nn.Dropout:
            problems.append(f"{name} is a {type(module).__name__} of rate {module.p}; only nn.Dropout is supported, set p to 0")
        elif (first := seen.setdefault(id(module), name)) != name:
            problems.append(f"{name} and {first} are one dropout module, so layers would share masks; give each its own")
        elif SITE not in vars(module) and "forward" in vars(module):
            problems.append(f"{name} is a dropout with a forward that is not its class's; remove it from the module")
        elif any("Experts" in type(parent).__name__ for parent in parents):
            problems.append(f"{name} drops inside experts, where tokens are sorted by expert; set its rate {module.p} to 0")
    return problems


def outer_dropout(model: nn.Module, layers: str) -> str:
    """The name of a dropout module of `model` outside its list of layers, its classifier and adapters; "" without one."""
    inside = [name for name, _ in _dropouts(model) if f"{layers}." in f"{name}." or "lora_" in name or "." not in name]
    return next((name for name, _ in _dropouts(model) if name not in inside), "")


def _dropouts(model: nn.Module) -> list[tuple[str, nn.Dropout]]:
    return [(name, each) for name, each in base_of(model).named_modules() if type(each) is nn.Dropout and each.p]


def forward(module: Any, x: Tensor) -> Tensor:
    """The forward of a dropout module: masks by token under a plan."""
    site: DropoutSite = vars(module)[SITE]
    if not module.training or not module.p:
        return x
    if site.keys.tokens is not None:
        return site.keys.tokens.drop(x, module.p, site.name)
    if site.keys.is_training:
        raise RuntimeError(
            f"dropout {site.name} ran outside of a plan during a training, where its masks would depend on the plan; call "
            f"model.eval() before forwards of your own"
        )
    dropped: Tensor = type(module).forward(module, x)
    return dropped
