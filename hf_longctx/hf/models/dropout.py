"""Makes dropout and NEFTune of one model depend on tokens alone, not on plans; no module of torch or peft is changed.

`DropoutPatch` gives every `nn.Dropout` with a rate above 0, also in LoRA's adapters, masks keyed by token
(`runtime.core.dropout`). Rates are those of torch, masks differ. In evaluation nothing is dropped. A forward without a plan drops
as torch does, but raises during a training under plans, since its masks would depend on the plan.

Masks follow tokens only if the module gets all tokens of a forward, or of one tile, in order. Functional dropout in a layer, and
dropout on tokens that were sorted by experts, are refused by name.

Dropout of attention weights (`WEIGHT_DROPOUT`) is in no module: the registered attention function gets its rate, and masks follow
document, query, key and head (`runtime.tiles.plain`). Attention layers have a site, which names their masks.

NEFTune (`neftune_noise_alpha`) adds noise to the embeddings of tokens in training. transformers draws it uniformly in
+- alpha / sqrt(tokens * channels), where the tokens are those of the padded row. Under a plan, noise is keyed by seed, step,
document, position and channel, and the tokens are those of the document, however it is packed or cut. So any plan draws the same
noise. Its distribution is that of transformers for a document alone; the numbers differ.

Source: Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", arXiv 2310.05914.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hf_longctx.families.family import Family
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.forwards import give, take
from hf_longctx.hf.models.towers import tower_names
from hf_longctx.plan.model.model_spec import WEIGHT_DROPOUT
from hf_longctx.runtime.core.binding import is_written_by
from hf_longctx.runtime.core.dropout import SITE, DropoutKeys, DropoutSite, DropoutTokens, keys_of

# words in the names of attention classes
_ATTENTIONS = ("Attention", "MLA")


class DropoutPatch:
    """Gives every dropout module of a model masks by token; all runs of a model share its keys."""

    def needed(self, model: nn.Module) -> bool:
        """Whether any module of the model, adapters included, drops values."""
        base = base_of(model)
        return bool(_dropouts(base) or _weighing(base))

    def apply(self, model: nn.Module) -> None:
        """Raises ValueError for a forward of others."""
        base, keys = base_of(model), keys_of(model) or DropoutKeys()
        for name, module in _weighing(base):
            vars(module).setdefault(SITE, DropoutSite(keys, weights_name(name)))
        for name, module in _dropouts(base):
            vars(module).setdefault(SITE, DropoutSite(keys, name))
            give(module, _forward)

    def undo(self, model: nn.Module) -> None:
        """Forgets the keys."""
        for module in model.modules():
            vars(module).pop(SITE, None)
            take(module, _forward)


def check_rates(model: nn.Module) -> None:
    """Raises ValueError for a dropout module whose rate was raised from 0 since the start of the run."""
    base = base_of(model)
    if late := [name for name, module in (*_dropouts(base), *_weighing(base)) if SITE not in vars(module)]:
        raise ValueError(
            f"dropout {late[0]} drops now, but dropped nothing when the run started, so its masks would depend on the plan; set "
            f"its rate before the trainer is made"
        )


def dropout_problems(text: nn.Module) -> list[str]:
    """Returns why masks of dropout modules in a text model cannot follow tokens, by module; empty if they can."""
    problems = []
    named, seen = dict(text.named_modules(remove_duplicate=False)), dict[int, str]()
    for name, module in named.items():
        if not isinstance(module, _DropoutNd) or not module.p:
            continue
        parents = [named[name[:place]] for place, letter in enumerate(name) if letter == "."]
        if type(module) is not nn.Dropout:
            problems.append(f"{name} is a {type(module).__name__} of rate {module.p}; only nn.Dropout is supported, set p to 0")
        elif (first := seen.setdefault(id(module), name)) != name:
            problems.append(f"{name} and {first} are one dropout module, so layers would share masks; give each its own")
        elif (SITE not in vars(module) and "forward" in vars(module)) or not is_written_by(nn.Dropout.forward, "torch"):
            problems.append(f"{name} is a dropout with a forward that is not its class's; remove it from the module")
        elif any("Experts" in type(parent).__name__ for parent in parents):
            problems.append(f"{name} drops inside experts, where tokens are sorted by expert; set its rate {module.p} to 0")
    return problems + _weight_problems(text)


def _weight_problems(text: Any) -> list[str]:
    """Returns why masks of attention weights cannot follow tokens, or problems with their rates."""
    rates = weight_rates(text.config.get_text_config()) if hasattr(text, "config") else {}
    problems = [
        f"{field} is {rate}, but must be from 0 to 1; set it in the model's config"
        for field, rate in rates.items()
        if not 0 <= rate <= 1
    ]
    first_names = {id(module): name for name, module in _weighing(text)}
    for name, module in text.named_modules(remove_duplicate=False):
        if first_names.get(id(module), name) != name:
            first = first_names[id(module)]
            return [
                *problems,
                f"{name} and {first} are one attention layer, so layers would share masks of its weights; set "
                f"{' and '.join(rates)} to 0.0",
            ]
    return problems


def outer_dropout(model: nn.Module, layers: str) -> str:
    """The name of a dropout module of `model` outside its list of layers, its towers, its classifier and adapters; "" if none."""
    towers = tuple(f"{name}." for name in tower_names(model))
    names = [name for name, _ in _dropouts(base_of(model))]
    inside = [name for name in names if f"{layers}." in f"{name}." or "lora_" in name or "." not in name]
    inside += [name for name in names if f"{name}.".startswith(towers)]
    return next((name for name in names if name not in inside), "")


def _dropouts(base: nn.Module) -> list[tuple[str, nn.Dropout]]:
    return [(name, each) for name, each in base.named_modules() if type(each) is nn.Dropout and each.p]


def keyed_fields(family: Family) -> tuple[str, ...]:
    """Fields of the configs of a family with dropout rates that may be above 0."""
    return (*family.dropout_fields, *(() if family.drops_more_than_weights else WEIGHT_DROPOUT))


def weight_rates(config: Any) -> dict[str, float]:
    """Rates above 0 for dropout of attention weights in a text model's config, by field."""
    return {field: rate for field in WEIGHT_DROPOUT if (rate := getattr(config, field, None))}


def _weighing(base: Any) -> list[tuple[str, nn.Module]]:
    """The attention layers of a model that drops attention weights."""
    if not hasattr(base, "config") or not weight_rates(base.config.get_text_config()):
        return []
    return [(name, each) for name, each in base.named_modules() if any(word in type(each).__name__ for word in _ATTENTIONS)]


def weights_name(name: str) -> str:
    """The site of the weights of the attention layer `name`."""
    return f"{name} weights"


def _forward(module: Any, x: Tensor) -> Tensor:
    """The forward of a dropout module: masks by token under a plan."""
    site: DropoutSite = vars(module)[SITE]
    if not module.training or not module.p:
        return x
    if not isinstance(x, Tensor):
        # a stand-in for attention weights under a plan, which notes the rate
        return F.dropout(x, module.p, module.training)
    if (tokens := tokens_of(site)) is None:
        dropped: Tensor = type(module).forward(module, x)
        return dropped
    if x.dim() == 4:
        return tokens.drop_weights(x, module.p, weights_name(site.name.rpartition(".")[0]))
    return tokens.drop(x, module.p, site.name)


def tokens_of(site: DropoutSite) -> DropoutTokens | None:
    """The tokens that run now; None outside of a training. Raises RuntimeError without tokens during a training."""
    if site.keys.tokens is None and site.keys.is_training:
        raise RuntimeError(
            f"dropout {site.name} ran outside of a plan during a training, where its masks would depend on the plan; call "
            f"model.eval() before forwards of your own"
        )
    return site.keys.tokens


# attributes of an embedding: alpha, and the handle of its hook
_ALPHA, _HANDLE = "_longctx_noise_alpha", "_longctx_noise_handle"


def key_noise(model: nn.Module, alpha: float) -> None:
    """Lets the embedding of `model` add noise by token in training under plans; call it after `DropoutPatch`."""
    rest_noise(model)
    base = base_of(model)
    embedding: Any = base.get_input_embeddings()
    name = next(name for name, module in base.named_modules() if module is embedding)
    own = vars(embedding)
    own[SITE], own[_ALPHA] = DropoutSite(keys_of(model) or DropoutKeys(), f"{name} noise"), float(alpha)
    own[_HANDLE] = embedding.register_forward_hook(_noisy)


def rest_noise(model: nn.Module) -> None:
    """Undoes `key_noise`. Idempotent."""
    for module in model.modules():
        if (handle := vars(module).pop(_HANDLE, None)) is not None:
            handle.remove()
            del vars(module)[SITE], vars(module)[_ALPHA]


def noise_problems(alpha: float | None, started_alpha: float | None) -> list[str]:
    """The problem with a trainer's `alpha` if its run was started with another one, `started_alpha`."""
    if alpha == started_alpha:
        return []
    return [
        f"the trainer's neftune_noise_alpha was set to {alpha!r}, but its plans were started with {started_alpha!r} and draw "
        f"their noise by that; set neftune_noise_alpha in TrainingArguments before the trainer is made, or attached"
    ]


def _noisy(embedding: Any, args: Any, output: Tensor) -> Tensor:
    """Forward hook: the embeddings [1, T, C] with noise; unchanged in evaluation, and in forwards without a plan."""
    site: DropoutSite = vars(embedding)[SITE]
    if not embedding.training:
        return output
    if (tokens := site.keys.tokens) is None:
        if site.keys.is_training:
            raise RuntimeError(
                f"the embedding {site.name} ran outside of a plan during a training with neftune_noise_alpha; call model.eval() "
                f"before forwards of your own"
            )
        return output
    num_channels, alpha = output.shape[-1], vars(embedding)[_ALPHA]
    noise_TC = output.new_empty(len(tokens.positions_T), num_channels)
    for block, uniform_NC in tokens.uniform(num_channels, site.name):
        wide = uniform_NC.to(torch.promote_types(output.dtype, torch.float32))
        sizes_N1 = tokens.lengths_T[block].to(wide.dtype).unsqueeze(1) * num_channels
        noise_TC[block] = (2 * wide - 1) * (alpha / sizes_N1.sqrt())
    # in place, since the noise is as large as the embeddings and of no further use
    return noise_TC.view(output.shape).add_(output)
