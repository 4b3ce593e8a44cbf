"""Lets the mixers of one model run the functions of `functions` under plans; no module of transformers is changed.

`models.attention.patch_model` patches the mixers of a model: every mixer gets a forward of its own. With a plan's context it runs
the code of its class's forward with other globals, in which the names of the convolution and the scan lead to ours. Without a
context it runs the class's own forward. So a mixer runs without a cache, and slices of one token take the same path as others.

Ours get transformers' own torch functions, also where a package with kernels (fla, causal_conv1d) is installed, and run a kernel
in their place only after its numbers have been compared (`runtime.states.kernels`). Kernels that transformers itself calls take
no fp32 or fp64, so copies in these run without them (`leave_kernels_out`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from hf_longctx.hf.models.context.forwards import CACHES
from hf_longctx.hf.models.states.functions import MIXERS, STAND_INS, MixerCall, StateFamily, family_of
from hf_longctx.hf.models.states.methods import METHODS
from hf_longctx.runtime.core.binding import HOOKS, is_ours, is_written_by, own_forward, with_globals

# words in the names and classes of modules that carry a state along the sequence; Kimi Linear is the name of a model
STATE_WORDS = (
    r"Mamba|DeltaNet|DeltaAttention|(?<!Kimi)LinearAttention|LightningAttention|ShortConv|Conv1d|Recurrent(?!Gemma)|RecurrentBlock|"
    r"RgLru|xLSTMLayer|[ms]LSTM|Rwkv(?!Block|Model)|TimeMix|CCA|Mixer$"
)

# function that chooses between a kernel and transformers' own torch code by itself -> name of the latter
_TORCH_CODE = {"rwkv_linear_attention": "rwkv_linear_attention_cpu"}
# mark of a mixer that runs without kernels
_NO_KERNELS = "_longctx_without_kernels"
# method of a decoder that divides weights for evaluation, and multiplies them again; attribute that says which it did last
_DIVIDE, _DIVIDED = "_rescale_layers", "layers_are_rescaled"
# attribute of a mixer: the plan's context that its parent got
_LENT = "_longctx_lent_context"


def mixers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The mixers of a model that run under plans, by name."""
    return {name: module for name, module in model.named_modules() if _class_name(module) in MIXERS}


def family_of_mixer(mixer: nn.Module) -> StateFamily:
    """The family of a mixer that runs under plans."""
    return MIXERS[_class_name(mixer)]


def _class_name(module: nn.Module) -> str:
    """Name of a module's class, also where sharding has put a class of torch in front of it."""
    return type(module).__name__.removeprefix("FSDP")


def num_calls(module: nn.Module) -> int:
    """Number of mixers and of attention layers in `module`, each of which gets the plan once in a forward."""
    mixers = mixers_of(module).values()
    others = (each for each in module.modules() if each not in mixers)
    return len(mixers) + sum(type(each).__name__.endswith("Attention") for each in others)


def patch_mixers(model: nn.Module) -> None:
    """Gives every mixer of `model` a forward that knows plans. Idempotent."""
    for mixer in mixers_of(model).values():
        # a plain method, so that it works on a copy of the model too
        vars(mixer)["forward"] = MethodType(_forward, mixer)
    for parent in _parents(model):
        vars(parent)["forward"] = MethodType(_parent_forward, parent)

    for decoder in _dividing(model):
        vars(decoder)[_DIVIDE] = MethodType(_keep_weights, decoder)


def restore_mixers(model: nn.Module) -> None:
    """Undoes `patch_mixers`. Idempotent."""
    for decoder in _dividing(model):
        vars(decoder).pop(_DIVIDE, None)
    for mixer in mixers_of(model).values():
        if is_patched(vars(mixer).get("forward")):
            del vars(mixer)["forward"]
    for parent in _parents(model):
        vars(parent).pop("forward", None)


def _dividing(model: nn.Module) -> list[nn.Module]:
    """Decoders that divide weights, and hidden states as often, when they first run in evaluation mode."""
    return [module for module in model.modules() if hasattr(type(module), _DIVIDE)]


def _keep_weights(decoder: nn.Module) -> None:
    """Leaves weights as they are in evaluation too, since checkpoints may be written then; only fp16 would overflow."""


def _parents(model: nn.Module) -> list[nn.Module]:
    """Modules around mixers that get the plan's context and do not pass it on."""
    names = {family.parent for family in MIXERS.values() if family.parent}
    return [module for module in model.modules() if type(module).__name__ in names]


def _parent_forward(parent: nn.Module, *args: Any, longctx: Any = None, **keywords: Any) -> Any:
    """The forward of the parent's class, whose mixers find the plan's context."""
    mixers = [child for child in parent.children() if type(child).__name__ in MIXERS]
    for mixer in mixers:
        vars(mixer)[_LENT] = longctx
    try:
        given = keywords if longctx is None else {**keywords, "longctx": longctx}
        return type(parent).forward(parent, *args, **given)
    finally:
        for mixer in mixers:
            del vars(mixer)[_LENT]


def leave_kernels_out(model: nn.Module) -> None:
    """Lets the mixers of `model`, which are patched, run transformers' own torch functions without a plan too."""
    for mixer in mixers_of(model).values():
        vars(mixer)[_NO_KERNELS] = True


def is_patched(function: Any) -> bool:
    """Whether a mixer's own forward is ours."""
    return getattr(function, "__func__", None) is _forward


def state_problems(model: nn.Module) -> list[str]:
    """Why states would not pass through the layers of a model with such mixers, by layer and class; empty if they do."""
    mixers = mixers_of(model)
    if not mixers and family_of(model) is None:
        return []
    known = tuple(f"{name}." for name in mixers)
    others = [
        f"{name} ({type(module).__name__}) carries a state along the sequence, and only {', '.join(sorted(MIXERS))} are "
        f"supported; use one of these"
        for name, module in model.named_modules()
        if name not in mixers
        and not name.startswith(known)
        # the model and the layer around a mixer may be named after it, and so may norms
        and name
        and not any(mixer.startswith(f"{name}.") for mixer in mixers)
        and not type(module).__name__.endswith("Norm")
        and re.search(STATE_WORDS, type(module).__name__)
    ]
    divided = [
        f"{name} ({type(module).__name__}) has divided its weights in a forward in evaluation mode, and plans would train these; "
        f"load the model anew, or run it once in training mode"
        for name, module in model.named_modules()
        if getattr(module, _DIVIDED, False)
    ]
    parents = [
        f"{name} ({type(parent).__name__}) has a forward that is not its class's, in whose place plans run theirs; remove it"
        for name, parent in model.named_modules()
        if parent in _parents(model) and (own := own_forward(parent)) is not None and not is_ours(own)
    ]
    return (
        others[:1] + divided + parents[:1] + [problem for name, mixer in mixers.items() if (problem := _problem(name, mixer))][:1]
    )


def _problem(name: str, mixer: nn.Module) -> str:
    own, function = vars(mixer).get("forward"), inspect.unwrap(type(mixer).forward)
    where = f"{name} ({type(mixer).__name__})"
    if own is not None and not is_patched(own):
        return f"{where} has a forward that is not its class's, so its states cannot be passed on; remove it from the module"
    family = family_of_mixer(mixer)
    modules = [path.partition(".")[0] for path in family.methods]
    missing = [each for each in (*family.functions, *modules) if each not in _names_in(type(mixer), function)]
    if missing:
        return (
            f"the forward of {where} does not call {' and '.join(missing)} in this version of transformers, so its states cannot "
            f"be passed on; use the newest version that docs/models.md names"
        )
    if not is_written_by(type(mixer).forward, "transformers", "torch"):
        return (
            f"the forward of the class of {where} was replaced by a function that wraps it, and plans would leave that out; hook "
            f"the module (register_forward_hook) in its place"
        )
    if foreign := [each for each in family.functions if isinstance(inspect.unwrap(function.__globals__[each]), nn.Module)]:
        return (
            f"{where} calls {foreign[0]} through the package kernels, whose numbers are not tested under plans; set "
            f"USE_HUB_KERNELS=0 in the environment before transformers is imported"
        )
    for path in family.methods:
        owner = mixer.get_submodule(path.rpartition(".")[0])
        method = getattr(owner, path.rpartition(".")[2])
        if not is_written_by(method, "transformers", "torch", "peft"):
            return f"{where} has another {path} than that of its class, which plans would leave out; remove it"
    return _hook_problem(where, mixer)


def _names_in(kind: type[nn.Module], function: Any) -> set[str]:
    """Names in the code of a mixer's forward, and in that of methods of its class that the forward calls."""
    own = function.__code__.co_names
    methods = [vars(kind)[name] for name in own if isinstance(vars(kind).get(name), FunctionType)]
    return {*own, *(name for method in methods for name in method.__code__.co_names)}


def _hook_problem(where: str, mixer: nn.Module) -> str:
    """Problem with hooks on modules whose forward is ours under a plan; our own hooks only watch for a while."""
    for path in dict.fromkeys(family_of_mixer(mixer).methods):
        owner, _, method = path.rpartition(".")
        if method != "forward":
            continue
        inside = mixer.get_submodule(owner).modules()
        hooks = [hook for module in inside for kind in HOOKS for hook in getattr(module, kind).values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("hf_longctx.") for hook in hooks):
            return (
                f"{where} has a hook on its module {owner}, which gets and returns other tensors under plans than under the "
                f"forward of the class; remove it, or hook the whole {type(mixer).__name__}"
            )
    return ""


def _forward(mixer: nn.Module, *args: Any, longctx: Any = None, **keywords: Any) -> Any:
    """The forward of a mixer: that of its class, with our functions under a plan."""
    longctx = longctx or vars(mixer).get(_LENT)
    if longctx is None and _NO_KERNELS not in vars(mixer):
        return type(mixer).forward(mixer, *args, **keywords)
    own, name = inspect.unwrap(type(mixer).forward), _class_name(mixer)
    family = family_of_mixer(mixer)
    functions = {each: inspect.unwrap(own.__globals__[_TORCH_CODE.get(each, each)]) for each in family.functions}
    left_out = {family.fused: _nothing} if family.fused else {}
    if longctx is None:
        return with_globals(own, functions | left_out)(mixer, *args, **keywords)
    if (mask := keywords.get("attention_mask")) is not None and mask.numel() == 1:
        # every forward under a plan gets such a mask, which hides nothing
        keywords["attention_mask"] = None
    for unwanted in ("attention_mask", *CACHES):
        given = keywords.get(unwanted)
        # the mask of plans is a single number
        if given is not None and not (isinstance(given, Tensor) and given.numel() == 1):
            raise ValueError(
                f"{name} got {unwanted} under a plan, which has none; run the model through the plan's executor only"
            )
    # hooks may come after the start
    if problem := _hook_problem(name, mixer):
        raise ValueError(problem)
    call = MixerCall(mixer, longctx)
    ours = {each: partial(_stand_in, each, function, call) for each, function in functions.items()}
    with _with_methods(mixer, family.methods, call):
        output = with_globals(own, ours | left_out)(mixer, *args, **keywords)
    expected = [*family.functions, *family.functions[-1:] * (family.num_scans(mixer) - 1), *family.methods]
    if sorted(call.called) != sorted(expected):
        raise RuntimeError(
            f"{name} called {', '.join(call.called) or 'nothing'} in place of {', '.join(expected)}, so its states may be "
            f"wrong; use the newest version of transformers that docs/models.md names"
        )
    longctx.calls.count += 1
    return output


def _nothing(*args: Any, **keywords: Any) -> None:
    """Stands in for a function of a kernel for all of a mixer, which transformers leaves out if it returns None."""


@contextmanager
def _with_methods(mixer: nn.Module, paths: Iterable[str], call: MixerCall) -> Iterator[None]:
    """Context in which methods of modules of a mixer are ours."""
    owners = [(mixer.get_submodule(path.rpartition(".")[0]), path) for path in dict.fromkeys(paths)]
    before = [dict(vars(owner)) for owner, _ in owners]
    for owner, path in owners:
        name = path.rpartition(".")[2]
        vars(owner)[name] = partial(_stand_in, path, getattr(owner, name), call)
    try:
        yield
    finally:
        for (owner, path), own in zip(owners, before, strict=True):
            name = path.rpartition(".")[2]
            vars(owner).pop(name)
            if name in own:
                vars(owner)[name] = own[name]


def _stand_in(name: str, function: Any, call: MixerCall, *args: Any, **keywords: Any) -> Any:
    call.called.append(name)
    return (STAND_INS | METHODS)[name](call, function, *args, **keywords)
