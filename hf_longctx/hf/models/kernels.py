"""Runs norms, gated MLPs and rotary embeddings of a model as single kernels under plans, and low-rank adapters in few passes.

The kernels are chosen, made and compared with the model's own code before the first step. The linear modules of an MLP and of
attention run as before, so adapters, shards and packed weights are as in the model's own forward. Inputs that a kernel cannot
take (mixed dtypes, batches in a rotary embedding, hooks inside an MLP) run the model's own code.

Shapes: N rows (tokens, or heads of tokens), C features, I inner features of an MLP, T tokens, H heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hf_longctx.families.registry import MIXERS
from hf_longctx.hf.models.adapters import base_of, hidden_dtype
from hf_longctx.hf.models.expert_adapters import GroupedProducts, bind_expert_adapters
from hf_longctx.hf.models.forwards import without_renames
from hf_longctx.hf.models.kernel_places import (
    KERNEL_NORMS,
    ROTARY,
    FusableModule,
    convolution_function,
    convolutions_in,
    fusable_modules,
    is_hooked,
)
from hf_longctx.hf.models.layers import other_matrices
from hf_longctx.hf.models.low_rank import bind_adapters
from hf_longctx.hf.models.states import CONVOLUTIONS
from hf_longctx.hf.models.towers import text_layers
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together
from hf_longctx.runtime.core import kernels as liger
from hf_longctx.runtime.core.binding import class_name, own_forward, replace_forward, with_globals
from hf_longctx.runtime.core.kernels import CompiledFunction, Function
from hf_longctx.runtime.states.convolution import (
    ConvolutionPackage,
    chooses_convolution,
    compiled_convolution,
    convolution_error,
    drawn_convolution,
)

# origin of the kernels; "": none, the model runs its own code
Maker = Literal["", "compile", "liger"]
_NAMES = {
    **{"norm": "norms", "gated_norm": "gated norms", "gated": "gated MLPs", "rotary": "rotary embeddings"},
    "convolution": "short convolutions",
}
_GATES: dict[str, Function] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}
# inputs of a kernel with one row for each token
_ROW_INPUTS = {"norm": 1, "gated_norm": 2, "gated": 2}
# rows of the comparison at start, and the largest error of a norm that rounding explains
_ROWS = 7
_LARGEST_ERROR = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class FusedLayers:
    """Binds kernels to the layers of one model at a time; `close` restores the model's own forwards. Idempotent.

    maker: origin of the kernels of norms, gated MLPs and rotary embeddings. backend: that of torch.compile. grouped: what is
    known of grouped products.
    """

    def __init__(self, maker: Maker, backend: str = "inductor", grouped: GroupedProducts | None = None) -> None:
        self.maker, self._backend = maker, backend
        self.grouped = grouped or GroupedProducts()
        self._package = ConvolutionPackage()
        self._model: nn.Module | None = None
        self._undo: list[Callable[[], None]] = []
        # keyed by everything that a function depends on, so that layers share it
        self._functions: dict[tuple[Any, ...], Function] = {}

    def bind(self, model: nn.Module) -> None:
        """Binds kernels to every known module of `model`; call it before an activation engine binds itself."""
        if model is self._model:
            return
        self.close()
        self._model = model
        for found in list(fusable_modules(model)):
            if found.kind == "convolution":
                # the package is tried without kernels of ours, too
                compiled = {found.activation: self._function(found)} if self._takes(found) else {}
                vars(found.module)[CONVOLUTIONS] = chooses_convolution(self._package, compiled)  # type: ignore[arg-type]
                self._undo.append(partial(vars(found.module).pop, CONVOLUTIONS))
            elif self._takes(found):
                self._undo.append(replace_forward(found.module, self._forward(found)))
                if found.kind == "norm":
                    KERNEL_NORMS.add(found.module)
                    self._undo.append(partial(KERNEL_NORMS.discard, found.module))
        # around the kernels, whose modules call projections too
        self._undo.extend(bind_adapters(model))
        self._undo.extend(bind_expert_adapters(model, self.grouped))

    def close(self) -> None:
        """Restores the model's own forwards."""
        while self._undo:
            self._undo.pop()()
        self._model = None

    def counts(self, model: nn.Module) -> dict[str, int]:
        """Number of norms, gated MLPs and rotary embeddings of `model` that run as kernels."""
        kinds = [found.kind for found in fusable_modules(model) if self._takes(found)]
        return {name: kinds.count(kind) for kind, name in _NAMES.items() if kind in kinds}  # type: ignore[arg-type]

    def covered(self, model: nn.Module) -> dict[str, bool]:
        """Fields of `ModelSpec` by function: whether all layers of the model run it as a kernel."""
        taken = [found for found in fusable_modules(model) if self._takes(found)]
        kernel_norms = {id(found.module) for found in taken if found.kind == "norm"}
        gated = [found.module for found in taken if found.kind == "gated" and not self._is_seen(found.module)]
        layers = text_layers(model)
        mixers = [each for layer in layers for each in layer.modules() if class_name(each) in MIXERS]
        norms = [each for layer in layers for each in layer.modules() if "norm" in type(each).__name__.lower()]
        gated_norms = [each for each in norms if "gated" in type(each).__name__.lower()]
        kernel_gated_norms = {id(found.module) for found in taken if found.kind == "gated_norm"}
        # other matrices belong to MLPs or experts with activations of their own
        in_gated = {id(weight) for module in gated for weight in module.parameters()}
        others = [weight for layer in layers for weight in other_matrices(layer) if id(weight) not in in_gated]
        return {
            "fuses_norms": bool(norms) and all(id(norm) in kernel_norms for norm in norms),
            "fuses_gated_norms": bool(gated_norms) and all(id(norm) in kernel_gated_norms for norm in gated_norms),
            "fuses_convolutions": 0 < len(mixers) == sum(found.kind == "convolution" for found in taken),
            "fuses_gates": len(gated) == len(layers) > 0 and not others,
            "fuses_rotary": sum(found.kind == "rotary" for found in taken) == len(layers) > 0,
        }

    def problem(self, model: nn.Module, device: torch.device, inner_dtype: torch.dtype) -> str:
        """Returns why a kernel cannot be made here, or differs from the model's code on random rows; empty if all are right.

        Makes all kernels of norms and gated MLPs, so that no step waits for them. inner_dtype: that of an MLP's products.
        """
        seen: set[tuple[Any, ...]] = set()
        for found in fusable_modules(model):
            if found.kind == "rotary" or not self._takes(found):
                continue
            is_mlp, width = found.kind == "gated", 0
            if found.kind == "convolution":
                own = _own_convolution(found)
                dtype, trains = inner_dtype, (True, *(weight.requires_grad for weight in own))
                key: tuple[Any, ...] = (*_key(found), dtype, trains, *(weight.shape for weight in own))
            else:
                width = getattr(found.module.gate_proj, "out_features", 64) if is_mlp else found.module.weight.numel()
                dtype = inner_dtype if is_mlp else found.module.weight.dtype
                # whether each input is trained
                trains = (True, True) if is_mlp else ((True,) * _ROW_INPUTS[found.kind] + (found.module.weight.requires_grad,))
                key = (*_key(found), width, dtype, trains)
            if key in seen:
                continue
            seen.add(key)
            try:
                if found.kind == "convolution":
                    error = self._convolution_error(found, dtype, device, trains)
                else:
                    error = self._error(found, width, dtype, device, trains)
            except Exception as reason:
                # compilers raise errors of any class
                return f"{type(found.module).__name__}: {type(reason).__name__}: {str(reason).strip().splitlines()[0][:200]}"
            if not error <= _LARGEST_ERROR[dtype]:
                name = type(found.module).__name__
                return f"{name}: the kernel differs from the model's own code by {error:.1g} of a norm in {dtype}"
        return ""

    def _takes(self, found: FusableModule) -> bool:
        if self.maker != "liger":
            return self.maker == "compile"
        return found.kind == "norm" or (found.kind == "gated" and liger.has_gate(found.activation))

    def _function(self, found: FusableModule) -> Function:
        """The kernel of a module."""
        key = _key(found)
        if key not in self._functions:
            self._functions[key] = self._made(found)
        return self._functions[key]

    def _made(self, found: FusableModule) -> Function:
        if self.maker == "liger" and found.kind == "norm":
            return partial(liger.norm, eps=found.eps, is_centred=found.is_centred)
        if self.maker == "liger":
            return partial(liger.gated, found.activation)
        if found.kind == "norm":
            return CompiledFunction(_norm(found), (0, None), num_gradients=2, backend=self._backend)
        if found.kind == "gated_norm":
            return CompiledFunction(_gated_norm(found), (0, 0, None), num_gradients=3, backend=self._backend)
        if found.kind == "convolution":
            return compiled_convolution(found.activation, self._backend)
        if found.kind == "gated":
            return CompiledFunction(_gate(found), (0, 0), num_gradients=2, backend=self._backend)
        return CompiledFunction(_rotate, (0, 0, 0, 0), num_gradients=2, num_linear=2, backend=self._backend)

    def _fits(self, *tensors: Tensor) -> bool:
        """Whether a kernel can take these tensors."""
        dtypes = {tensor.dtype for tensor in tensors}
        known = self.maker == "compile" or (len(dtypes) == 1 and dtypes <= set(liger.DTYPES))
        return known and not any(isinstance(tensor, DTensor) for tensor in tensors)

    def _forward(self, found: FusableModule) -> Function:
        module, own, function = found.module, found.module.forward, self._function(found)
        if found.kind == "rotary":
            rotary = partial(self._rotary, function)
            return partial(with_globals(without_renames(type(module).forward), {ROTARY: rotary}), module)
        if found.kind == "gated":
            return partial(self._mlp, module, own, function)
        if found.kind == "gated_norm":
            return partial(self._gated_norm, module, own, function)

        def norm(x: Tensor) -> Any:
            if not self._fits(x, module.weight):
                return own(x)
            return function(x.reshape(-1, x.shape[-1]).contiguous(), module.weight).view(x.shape)

        return norm

    def _mlp(self, module: Any, own: Function, function: Function, x: Tensor) -> Any:
        if self._is_seen(module):
            return own(x)
        gate, up = module.gate_proj(x), module.up_proj(x)
        if gate.dtype != up.dtype or not self._fits(gate, up):
            return module.down_proj(module.act_fn(gate) * up)
        product = function(*(each.reshape(-1, each.shape[-1]).contiguous() for each in (gate, up))).view(gate.shape)
        # free them: only what is saved of them is needed
        del gate, up
        return module.down_proj(product)

    def _gated_norm(
        self, module: Any, own: Function, function: Function, hidden_states: Tensor, gate: Tensor | None = None
    ) -> Any:
        if gate is None or gate.shape != hidden_states.shape or not self._fits(hidden_states, gate, module.weight):
            return own(hidden_states, gate)
        rows = (each.reshape(-1, each.shape[-1]).contiguous() for each in (hidden_states, gate))
        return function(*rows, module.weight).view(hidden_states.shape)

    def _is_seen(self, module: Any) -> bool:
        """Whether a user's hook sees the activation of an MLP, or tensors that a kernel overwrites."""
        # Liger overwrites the outputs of these modules, which a hook may have kept
        inner = [module.act_fn] if self.maker == "compile" else [module.act_fn, module.gate_proj, module.up_proj]
        return any(own_forward(each) is not None or is_hooked(each) for each in inner)

    def _rotary(
        self, function: Function, q_1HTD: Tensor, k_1HTD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        tensors = (q_1HTD, k_1HTD, cos_1TD, sin_1TD)
        is_learned = cos_1TD.requires_grad or sin_1TD.requires_grad
        if unsqueeze_dim != 1 or any(x.shape[0] != 1 for x in tensors) or is_learned or not self._fits(*tensors):
            rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(*tensors, unsqueeze_dim=unsqueeze_dim)
            return rotated
        q_THD, k_THD = function(
            *(x[0].transpose(0, 1).contiguous() for x in (q_1HTD, k_1HTD)), *(x[0].contiguous() for x in (cos_1TD, sin_1TD))
        )
        return q_THD.transpose(0, 1).unsqueeze(0), k_THD.transpose(0, 1).unsqueeze(0)

    def _error(
        self, found: FusableModule, width: int, dtype: torch.dtype, device: torch.device, trains: tuple[bool, ...]
    ) -> float:
        """Largest error of outputs and gradients on random rows, as a share of a norm."""
        own: Function = {"norm": _norm, "gated_norm": _own_gated_norm, "gated": _gate}[found.kind](found)
        generator = torch.Generator().manual_seed(0)
        rows, weights = [(_ROWS, width)], [] if found.kind == "gated" else [(width,)]
        shapes = [*rows * _ROW_INPUTS[found.kind], *weights, *rows]
        inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        results = []
        for function in (own, self._function(found)):
            # kernels may overwrite their inputs
            *tensors, gradient = (tensor.clone() for tensor in inputs)
            leaves = [tensor.requires_grad_(need) for tensor, need in zip(tensors, trains, strict=True)]
            output = function(*(leaf * 1 if leaf.requires_grad else leaf for leaf in leaves))
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            results.append([output.detach(), *torch.autograd.grad(output, trained, gradient)])
        pairs = zip(*results, strict=True)
        return max(float((found - right).double().norm() / right.double().norm().clamp(min=1e-30)) for right, found in pairs)

    def _convolution_error(
        self, found: FusableModule, dtype: torch.dtype, device: torch.device, trains: tuple[bool, ...]
    ) -> float:
        """Largest error of a mixer's convolution on a small row of documents, as a share of a norm."""
        weight, *bias = _own_convolution(found)
        drawn = drawn_convolution(weight.shape[0], weight.shape[-1], bool(bias), dtype, device)
        convolution: Any = self._function(found)
        run, activation = convolution_function(found.module), found.activation or None

        def own(x_1CN: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
            result: Tensor = run(x_1CN, weight_CW, bias_C, activation=activation)
            return result

        return convolution_error(convolution, own, drawn, trains)


def _own_convolution(found: FusableModule) -> list[Tensor]:
    """Weight and bias, if there is one, of the convolution of a mixer."""
    (module,) = convolutions_in(found.module)
    return [weight for weight in (module.weight, module.bias) if weight is not None]


class _OfLlama:
    """Stand-in of a norm, which lets a compiler see the weight as an input."""

    forward = LlamaRMSNorm.forward

    def __init__(self, weight_C: Tensor, eps: float) -> None:
        self.weight, self.variance_epsilon = weight_C, eps


class _OfGemma:
    """Stand-in of a norm whose weights count from 1."""

    forward, _norm = GemmaRMSNorm.forward, GemmaRMSNorm._norm

    def __init__(self, weight_C: Tensor, eps: float) -> None:
        self.weight, self.eps = weight_C, eps


def _norm(found: FusableModule) -> Function:
    kind: Any = _OfGemma if found.is_centred else _OfLlama
    eps = found.eps

    def norm(x_NC: Tensor, weight_C: Tensor) -> Tensor:
        result: Tensor = kind(weight_C, eps).forward(x_NC)
        return result

    return norm


def _key(found: FusableModule) -> tuple[Any, ...]:
    """All that the function of a module depends on."""
    return tuple(getattr(found, each.name) for each in fields(found) if each.name != "module")


def _own_gated_norm(found: FusableModule) -> Function:
    """The code of the class, with the weight as an input."""
    module = found.module
    run: Any = without_renames(type(module).forward)

    def own(x_NC: Tensor, gate_NC: Tensor, weight_C: Tensor) -> Tensor:
        stand_in = SimpleNamespace(**{name: value for name, value in vars(module).items() if not name.startswith("_")})
        stand_in.weight = weight_C
        result: Tensor = run(stand_in, x_NC, gate_NC)
        return result

    return own


def _gated_norm(found: FusableModule) -> Function:
    """The function of `_own_gated_norm`, without the look-up of its activation, which no compiler takes."""
    eps, activation, gates_first, groups = found.eps, _GATES[found.activation], found.gates_first, found.groups
    is_wide = found.is_wide

    def gated_norm(x_NC: Tensor, gate_NC: Tensor, weight_C: Tensor) -> Tensor:
        wide_NC, gate = x_NC.to(torch.float32), activation(gate_NC.to(torch.float32))
        if gates_first:
            wide_NC = wide_NC * gate
        wide = wide_NC.view(*wide_NC.shape[:-1], groups, wide_NC.shape[-1] // groups)
        normed_NC = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).view(wide_NC.shape)
        weighed = weight_C.to(torch.float32) * normed_NC if is_wide else weight_C * normed_NC.to(x_NC.dtype)
        if gates_first and not is_wide:
            # in the wider dtype of weight and input
            return weighed
        return (weighed if gates_first else weighed * gate).to(x_NC.dtype)

    return gated_norm


def _gate(found: FusableModule) -> Function:
    activation = _GATES[found.activation]

    def gated(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
        result: Tensor = activation(gate_NI) * up_NI
        return result

    return gated


def _rotate(q_THD: Tensor, k_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    q_1THD, k_1THD = apply_rotary_pos_emb(*(x.unsqueeze(0) for x in (q_THD, k_THD, cos_TD, sin_TD)), unsqueeze_dim=2)
    return q_1THD[0], k_1THD[0]


logger = logging.getLogger(__name__)

_LEFT_OUT = "left out: its rotary embedding, which writes over what plans keep, and its losses, which plans compute in tiles"


def compiled_layers(
    model: nn.Module,
    device: torch.device,
    is_autocast: bool,
    compile_layers: bool | None,
    control: dist.ProcessGroup | None,
) -> FusedLayers:
    """Compiles kernels for `model` and compares them with its own code; an empty `FusedLayers` if off or if any rank fails.

    Collective over the ranks of `control`. compile_layers: None compiles on CUDA. is_autocast: products run in bf16.
    """
    if not (device.type == "cuda" if compile_layers is None else compile_layers):
        return FusedLayers("")
    layers = FusedLayers("compile")
    problem = layers.problem(model, device, _inner_dtype(model, is_autocast))
    failed = next((each for each in gather_objects(problem, control) if each), "")
    if failed and (control is None or dist.get_rank(control) == 0):
        logger.warning(
            "compile_layers is left out, and layers run their own code: %s; torch.compile needs a C++ compiler on CPU and "
            "Triton on a GPU (compile_layers=False does not try)",
            failed,
        )
    return FusedLayers("") if failed else layers


def _inner_dtype(model: nn.Module, is_autocast: bool) -> torch.dtype:
    """Dtype of an MLP's products."""
    return torch.bfloat16 if is_autocast else hidden_dtype(model)


def fused_layers(
    model: nn.Module, args: TrainingArguments, compile_layers: bool | None, control: dist.ProcessGroup | None
) -> tuple[FusedLayers, str]:
    """Makes kernels for `model`; compares them, and grouped products of experts; returns a line for the log, too. Collective.

    control: group of all ranks. compile_layers: None compiles on CUDA. If compiling fails on any rank, all run the model's own
    code. Raises ValueError on all ranks if Liger's kernels cannot run here or differ from that code.
    """
    if args.use_liger_kernel:
        layers = FusedLayers("liger")
        problem = layers.problem(model, args.device, _inner_dtype(model, args.bf16))
        what = f"use_liger_kernel=True cannot be used: {problem}; leave it out (Liger's kernels need a GPU)"
        raise_together([what] if problem else [], control)
    else:
        layers = compiled_layers(model, args.device, args.bf16, compile_layers, control)
    layers.grouped.compare(model, args.device, control)
    if not layers.maker:
        return layers, ""
    counts = layers.counts(model)
    found = ", ".join(f"{count} {name}" for name, count in counts.items()) or f"nothing in {type(base_of(model)).__name__}"
    return layers, f"Liger runs {found}; {_LEFT_OUT}" if layers.maker == "liger" else f"torch.compile runs {found}"
