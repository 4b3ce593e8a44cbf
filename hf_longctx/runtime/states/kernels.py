"""Scans all documents of a row in one call of a package's kernel, if one is installed and proves correct.

On CUDA, transformers' torch code of a scan starts some ten small kernels per tile and document. Packages have kernels that take
the boundaries of documents: `chunk_gated_delta_rule` of flash-qla and of flash-linear-attention, `chunk_kda` of the latter,
`mamba_chunk_scan_combined` of mamba_ssm. Their numbers and signatures change between releases. So a kernel is used only after its
outputs, last state and all gradients for a small row of documents have been compared with a slow, obvious scan token by token in
fp32 (`by_token`), once per device capability, dtype and sizes of heads. A package that is not installed is skipped; one that
differs or fails is not used, with a warning in the log that names its version and the difference. Of several kernels for a scan,
the first that is installed and right runs.

Only a row's first document may start from a state, and only its last may leave one; `recurrence` cuts rows accordingly. Ranks
that pass states on run each of their runs of tokens as a row of its own, from zeros or from the state that shows what an earlier
one would change (`passing`), and leave its last state.

Inputs, weights and states are those of `recurrence.scan_documents`. Shapes: T tokens of a row, N documents of it, or tokens of
one document, G heads of queries and keys, H heads with a state (a multiple of G; neighbouring heads share a query and a key), K
size of a key, E size of a value.
"""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.core.packages import PackageFunction

logger = logging.getLogger(__name__)

# largest difference, as root mean square over a document, relative to that of the whole result: kernels multiply matrices in
# the dtype of their inputs; in fp32 this refuses products of TF32
_TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 5e-5}

# rows whose boundaries are kept on the device: a chunk has as many as its scan has blocks
_KEPT_ROWS = 64


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of a scan's heads, on which a kernel's code depends."""

    # elements of a head's queries and keys, and of its values
    key: int
    value: int
    # heads with a state that share a query and a key
    readers: int
    # tokens that are computed at once
    tile: int = 64


@dataclass(frozen=True, slots=True)
class Row:
    """Boundaries of the documents of one call, from 0 to T. goes_on: whether the state after the last one is needed."""

    boundaries: tuple[int, ...]
    goes_on: bool

    @property
    def num_documents(self) -> int:
        return len(self.boundaries) - 1


# (dtype, sizes of heads, capability of the device, settings of the scan)
_Key = tuple[torch.dtype, HeadSizes, tuple[int, int], tuple[Any, ...]]


@dataclass
class ScanKernel(PackageFunction, ABC):
    """A package's function that scans the documents of a row."""

    # dtypes that it takes
    dtypes: tuple[torch.dtype, ...] = tuple(_TOLERANCES)
    # further keywords with which it is called
    fixed: dict[str, Any] = field(default_factory=dict)
    # why the function is not used, or "", by everything that a check depends on
    verdicts: dict[_Key, str] = field(default_factory=dict)
    _boundaries: OrderedDict[tuple[tuple[int, ...], torch.device], Tensor] = field(default_factory=OrderedDict)

    @abstractmethod
    def sizes(self, tensors: Sequence[Tensor], settings: tuple[Any, ...]) -> HeadSizes:
        """Returns the sizes of the heads of a scan's tensors."""

    def passing_sizes(self, sizes: HeadSizes) -> HeadSizes:
        """Returns the sizes with which tokens also give the effect of a state before them, if ranks pass states on."""
        return sizes

    @abstractmethod
    def in_kernel_format(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors have the dtypes that the check covers."""

    @abstractmethod
    def call(
        self, tensors: Sequence[Tensor], state: Tensor | None, row: Row, settings: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the kernel; returns outputs [1, T, H, E], and the state after the last document if `row.goes_on`."""

    @abstractmethod
    def by_token(self, tensors: Sequence[Tensor], state: Tensor | None, settings: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Computes outputs and last state of one document, token by token."""

    @abstractmethod
    def drawn(self, sizes: HeadSizes, num_tokens: int, settings: tuple[Any, ...]) -> dict[str, Tensor]:
        """Draws tensors of a scan by name, on the CPU, in bf16 if their dtype is the model's, else in fp32; and a state."""

    def takes(self, tensors: Sequence[Tensor], settings: tuple[Any, ...]) -> bool:
        """Whether the kernel is installed and correct for a scan of such tensors; the first call for such tensors checks it."""
        # queries of a delta rule may be wider
        x = tensors[1]
        if x.device.type != self.device_type or x.dtype not in self.dtypes or not self.in_kernel_format(tensors):
            return False
        return not self.problem(x.device, x.dtype, self.sizes(tensors, settings), settings)

    def problem(self, device: torch.device, dtype: torch.dtype, sizes: HeadSizes, settings: tuple[Any, ...]) -> str:
        """Describes why the kernel is not used for such scans; empty if it is. The first call for them checks, and warns."""
        if device.type != self.device_type:
            return f"it runs on {self.device_type}"
        if dtype not in self.dtypes:
            return f"it takes no {str(dtype).removeprefix('torch.')}"
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        key = (dtype, sizes, capability, settings)
        if key not in self.verdicts:
            self.verdicts[key] = found = self.problem_in(partial(self._checked, device, dtype, sizes, settings))
            if found and self.is_installed:
                logger.warning(
                    "%s is not used for scans of heads of %d and %d in %s, which run by torch: %s",
                    *(self.label, sizes.key, sizes.value, dtype, found),
                )
        return self.verdicts[key]

    @property
    def keywords(self) -> tuple[str, ...]:
        """Names of all keyword arguments with which it is called."""
        return (*self.arguments, *self.fixed)

    def boundaries(self, row: Row, device: torch.device) -> Tensor:
        """Returns `marks` of a row on the device; those of the last rows are cached, since every layer needs them."""
        key = (row.boundaries, device)
        known = self._boundaries.pop(key, None)
        if known is None:
            # they may be saved for backward later
            with torch.inference_mode(False):
                known = self.marks(row).to(device)
        self._boundaries[key] = known
        if len(self._boundaries) > _KEPT_ROWS:
            self._boundaries.popitem(last=False)
        return known

    def marks(self, row: Row) -> Tensor:
        """Returns the boundaries of documents in the kernel's format, on the CPU."""
        return torch.tensor(row.boundaries)

    def _checked(self, device: torch.device, dtype: torch.dtype, sizes: HeadSizes, settings: tuple[Any, ...]) -> str:
        worst, error = worst_error(self, device, dtype, sizes, settings)
        # written so that NaN fails too
        if not error <= _TOLERANCES[dtype]:
            return f"its {worst} differs from a scan token by token by {error:.1e} (limit {_TOLERANCES[dtype]:.1e})"
        return ""


def worst_error(
    kernel: ScanKernel, device: torch.device, dtype: torch.dtype, sizes: HeadSizes, settings: tuple[Any, ...]
) -> tuple[str, float]:
    """Returns the kernel's result that differs most from a scan token by token, and the difference; NaN stays NaN.

    Rows with and without a first and a last state are compared. The difference is the largest root mean square over a document,
    relative to that of the result over all documents.
    """
    tile = sizes.tile
    # the last document has a whole tile between two others, which only carries a state on
    lengths = (tile + 3, 1, tile, 5, tile // 2, tile + 2, 2 * tile + 7)
    boundaries = tuple(itertools.accumulate(lengths, initial=0))
    drawn = kernel.drawn(sizes, boundaries[-1], settings)
    inputs = {name: x.to(device, dtype if x.dtype == torch.bfloat16 else x.dtype) for name, x in drawn.items()}
    errors: dict[str, float] = {}
    for has_first, goes_on in itertools.product((True, False), repeat=2):
        row = Row(boundaries, goes_on)
        ends = [name for name, is_there in (("first", has_first), ("last", goes_on)) if is_there]
        with_states = f"with a {' and a '.join(ends)} state" if ends else "without states"
        mine = {name: x for name, x in inputs.items() if has_first or name != "first state"}

        def by_kernel(tensors: list[Tensor], state: Tensor | None, row: Row = row) -> tuple[Tensor, Tensor | None]:
            return kernel.call(tensors, state, row, settings)

        def one_by_one(tensors: list[Tensor], state: Tensor | None, row: Row = row) -> tuple[Tensor, Tensor | None]:
            outputs = []
            for start, stop in itertools.pairwise(row.boundaries):
                parts = [x[:, start:stop] if x.dim() > 1 else x for x in tensors]
                output, after = kernel.by_token(parts, state if start == 0 else None, settings)
                outputs.append(output)
            return torch.cat(outputs, dim=1), after if row.goes_on else None

        expected = _results({name: x.float() for name, x in mine.items()}, one_by_one)
        found = _results(mine, by_kernel)
        if found.keys() != expected.keys():
            raise ValueError(f"it returns {', '.join(found)} in place of {', '.join(expected)}")
        for name, wanted in expected.items():
            if found[name].shape != wanted.shape:
                raise ValueError(f"its {name} has shape {list(found[name].shape)} in place of {list(wanted.shape)}")
            squares = (found[name].float() - wanted).square()
            by_document = [squares]
            if squares.dim() > 1 and squares.shape[1] == boundaries[-1]:
                by_document = [squares[:, start:stop] for start, stop in itertools.pairwise(boundaries)]
            error = torch.stack([each.mean() for each in by_document]).max().sqrt() / wanted.square().mean().sqrt()
            errors[f"{name} of a row {with_states}"] = float(error)
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    return worst, errors[worst]


def _results(
    inputs: dict[str, Tensor], scan: Callable[[list[Tensor], Tensor | None], tuple[Tensor, Tensor | None]]
) -> dict[str, Tensor]:
    """Returns outputs, the last state if there is one, and gradients of all inputs for random gradients of both."""
    device = next(iter(inputs.values())).device
    # the first scan may run inside a model's forward: under autocast, without gradients, with hooks on saved tensors
    untouched = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), untouched:
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        output, after = scan([x for name, x in leaves.items() if name != "first state"], leaves.get("first state"))
        made = {"output": output} if after is None else {"output": output, "last state": after}
        generator = torch.Generator().manual_seed(1)
        # rounded in the same way for all dtypes
        given = [torch.randn(x.shape, generator=generator).bfloat16().to(x) for x in made.values()]
        gradients = torch.autograd.grad(list(made.values()), list(leaves.values()), given)
    named = {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in made.items()} | named


@dataclass(frozen=True, slots=True)
class KernelScan:
    """Kernels for a mixer's scan, the fastest first, with its settings."""

    kernels: tuple[ScanKernel, ...]
    settings: tuple[Any, ...]

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a kernel is installed and correct for a scan of such tensors."""
        return any(kernel.takes(tensors, self.settings) for kernel in self.kernels)

    def __call__(self, tensors: Sequence[Tensor], state: Tensor | None, row: Row) -> tuple[Tensor, Tensor | None]:
        """Runs the first that takes the tensors; returns outputs [1, T, H, E], and the last state if `row.goes_on`."""
        kernel = next(each for each in self.kernels if each.takes(tensors, self.settings))
        return kernel.call(tensors, state, row, self.settings)


@dataclass
class DeltaKernel(ScanKernel):
    """A gated delta rule; settings: whether it normalizes queries and keys. by_channel: decays have a number per channel."""

    by_channel: bool = False

    def sizes(self, tensors: Sequence[Tensor], settings: tuple[Any, ...]) -> HeadSizes:
        """Sizes of the heads of keys and values."""
        _, k, v, *_ = tensors
        return HeadSizes(k.shape[-1], v.shape[-1], v.shape[2] // k.shape[2])

    def passing_sizes(self, sizes: HeadSizes) -> HeadSizes:
        """Adds a column of values for each element of a key (`passing.DeltaRule`)."""
        return replace(sizes, value=sizes.value + sizes.key)

    def in_kernel_format(self, tensors: Sequence[Tensor]) -> bool:
        """Whether keys, values and strengths have one dtype, and decays are in fp32, one per head or per channel.

        Queries have that dtype, or are widened to fp32, as is their output then (`passing.DeltaRule`).
        """
        q, k, v, decay, strength = tensors
        is_uniform = k.dtype == v.dtype == strength.dtype and q.dtype in (k.dtype, torch.float32)
        is_uniform = is_uniform and decay.dtype == torch.float32
        return is_uniform and (decay.dim() == 4) == self.by_channel

    def call(
        self, tensors: Sequence[Tensor], state: Tensor | None, row: Row, settings: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the package's rule; returns outputs and last state [1, H, K, E]."""
        q, k, v, decay, strength = tensors
        # the other documents start from zeros
        states = None if state is None else F.pad(state, (0, 0, 0, 0, 0, 0, 0, row.num_documents - 1))
        output, after = self.function(
            *(q.to(k.dtype), k, v),
            g=decay,
            beta=strength,
            initial_state=states,
            output_final_state=row.goes_on,
            use_qk_l2norm_in_kernel=settings[0],
            cu_seqlens=self.boundaries(row, q.device),
            **self.fixed,
        )
        return output.to(q.dtype), after[-1:] if row.goes_on else None

    def by_token(self, tensors: Sequence[Tensor], state: Tensor | None, settings: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Outputs and last state of one document."""
        return delta_rule(tensors, state, normalize=settings[0])

    def drawn(self, sizes: HeadSizes, num_tokens: int, settings: tuple[Any, ...]) -> dict[str, Tensor]:
        """Draws two heads of queries and keys, with decays of heads from 0.98 to 0.2 per token."""
        generator, heads = torch.Generator().manual_seed(0), 2 * sizes.readers
        q, k = (torch.randn(1, num_tokens, 2, sizes.key, generator=generator) for _ in range(2))
        # keys that are not normalized by the rule have a length of about one
        k = k if settings[0] else F.normalize(k, dim=-1)
        v = torch.randn(1, num_tokens, heads, sizes.value, generator=generator)
        channels = (sizes.key,) if self.by_channel else ()
        rates = torch.logspace(-1.7, 0.2, heads).view(1, 1, heads, *(1 for _ in channels))
        decay = -rates * torch.rand(1, num_tokens, heads, *channels, generator=generator)
        strength = torch.rand(1, num_tokens, heads, generator=generator)
        state = torch.randn(1, heads, sizes.key, sizes.value, generator=generator) * sizes.key**-0.5
        q, k, v, strength = (x.bfloat16() for x in (q, k, v, strength))
        return {"queries": q, "keys": k, "values": v, "decays": decay, "strengths": strength, "first state": state}


@dataclass
class MambaKernel(ScanKernel):
    """A Mamba 2 scan; settings: tokens of a tile, whether steps are activated, and their limits."""

    def sizes(self, tensors: Sequence[Tensor], settings: tuple[Any, ...]) -> HeadSizes:
        """Sizes of a state."""
        into, _, x, *_ = tensors
        return HeadSizes(into.shape[-1], x.shape[-1], x.shape[2] // into.shape[2], settings[0])

    def in_kernel_format(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all inputs have one dtype; weights are cast."""
        into, out, x, step, *_ = tensors
        return into.dtype == out.dtype == x.dtype == step.dtype

    def marks(self, row: Row) -> Tensor:
        """Returns the document number of each token [1, T]."""
        lengths = torch.tensor(row.boundaries).diff()
        return torch.arange(row.num_documents, dtype=torch.int32).repeat_interleave(lengths).unsqueeze(0)

    def call(
        self, tensors: Sequence[Tensor], state: Tensor | None, row: Row, settings: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Runs mamba_ssm's scan, whose first state is the first document's; returns outputs and last state [1, H, E, K]."""
        into, out, x, step, decay, bias, past = tensors
        tile, softplus, limits = settings
        found = self.function(
            *(x, step, decay.float(), into, out, tile),
            D=past.float(),
            dt_bias=bias.float(),
            initial_states=state,
            seq_idx=self.boundaries(row, x.device),
            dt_softplus=softplus,
            dt_limit=limits,
            return_final_states=row.goes_on,
        )
        output, after = found if row.goes_on else (found, None)
        return output, after

    def by_token(self, tensors: Sequence[Tensor], state: Tensor | None, settings: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Outputs and last state of one document."""
        return mamba2(tensors, state, softplus=settings[1], limits=settings[2])

    def drawn(self, sizes: HeadSizes, num_tokens: int, settings: tuple[Any, ...]) -> dict[str, Tensor]:
        """Draws two groups of heads, with decays of heads from 0.99 to 0.3 per token for steps of about 0.1."""
        generator, heads = torch.Generator().manual_seed(0), 2 * sizes.readers
        into, out = (torch.randn(1, num_tokens, 2, sizes.key, generator=generator) * sizes.key**-0.5 for _ in range(2))
        x = torch.randn(1, num_tokens, heads, sizes.value, generator=generator)
        step = torch.randn(1, num_tokens, heads, generator=generator)
        # steps that are not activated are positive
        step = step - 2.0 if settings[1] else 0.1 + 0.02 * step
        decay, bias = -torch.logspace(-1.0, 1.0, heads), torch.rand(heads, generator=generator) * 0.1
        past = torch.randn(heads, generator=generator)
        state = torch.randn(1, heads, sizes.value, sizes.key, generator=generator)
        into, out, x, step = (each.bfloat16() for each in (into, out, x, step))
        inputs = {"state inputs": into, "state outputs": out, "tokens": x, "steps": step}
        return inputs | {"decays": decay, "biases": bias, "skips": past, "first state": state}


_RULE = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens")
_FLA = "flash-linear-attention"
# auto_cp splits long documents among multiprocessors and leaves out corrections that it takes for noise, which is not exact
QWEN_DELTA_RULE = DeltaKernel(
    "flash-qla",
    "flash_qla",
    "chunk_gated_delta_rule",
    _RULE,
    dtypes=(torch.bfloat16, torch.float16),
    fixed={"auto_cp": False},
)
GATED_DELTA_RULE = DeltaKernel(_FLA, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _RULE)
KIMI_DELTA_ATTENTION = DeltaKernel(_FLA, "fla.ops.kda", "chunk_kda", _RULE, by_channel=True)
MAMBA2_SCAN = MambaKernel(
    "mamba-ssm",
    "mamba_ssm.ops.triton.ssd_combined",
    "mamba_chunk_scan_combined",
    ("D", "dt_bias", "initial_states", "seq_idx", "dt_softplus", "dt_limit", "return_final_states"),
)


def delta_rule(tensors: Sequence[Tensor], state_1HKE: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """Returns outputs [1, N, H, E] and last state of a gated delta rule (Yang et al. 2025, arXiv:2412.06464, equation 10).

    A state decays with every token; then its value for the token's key moves towards the token's value. tensors: queries and
    keys [1, N, G, K], values [1, N, H, E], logarithms of decays [1, N, H] or [1, N, H, K], strengths [1, N, H]. normalize:
    whether to divide queries and keys by their length first.
    """
    q_1NGK, k_1NGK, v_1NHE, decay, strength_1NH = tensors
    if normalize:
        q_1NGK, k_1NGK = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q_1NGK, k_1NGK))
    per_read = v_1NHE.shape[2] // k_1NGK.shape[2]
    q_1NHK, k_1NHK = (x.repeat_interleave(per_read, dim=2) for x in (q_1NGK * k_1NGK.shape[-1] ** -0.5, k_1NGK))
    left_1NHK = (decay if decay.dim() == 4 else decay.unsqueeze(-1)).exp()
    state = v_1NHE.new_zeros(1, *k_1NHK.shape[2:], v_1NHE.shape[-1]) if state_1HKE is None else state_1HKE
    outputs = []
    for token in range(v_1NHE.shape[1]):
        q, k, v = q_1NHK[:, token], k_1NHK[:, token], v_1NHE[:, token]
        state = state * left_1NHK[:, token].unsqueeze(-1)
        missing = v - (k.unsqueeze(-1) * state).sum(-2)
        state = state + k.unsqueeze(-1) * (strength_1NH[:, token].unsqueeze(-1) * missing).unsqueeze(-2)
        outputs.append((q.unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs, dim=1), state


def mamba2(
    tensors: Sequence[Tensor], state_1HEK: Tensor | None, softplus: bool, limits: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Returns outputs [1, N, H, E] and last state of a Mamba 2 scan (Dao and Gu 2024, arXiv:2405.21060, section 2).

    tensors: input and output projections of the state [1, N, G, K], tokens [1, N, H, E], steps [1, N, H]; for each head its
    decay, the bias of steps, and the share of a token that skips the state. softplus: whether steps are activated. limits: of
    steps.
    """
    into_1NGK, out_1NGK, x_1NHE, step_1NH, decay_H, bias_H, past_H = tensors
    step_1NH = step_1NH + bias_H
    step_1NH = (F.softplus(step_1NH) if softplus else step_1NH).clamp(*limits)
    per_read = x_1NHE.shape[2] // into_1NGK.shape[2]
    into_1NHK, out_1NHK = (x.repeat_interleave(per_read, dim=2) for x in (into_1NGK, out_1NGK))
    left_1NH = (step_1NH * decay_H).exp()
    state = x_1NHE.new_zeros(1, *x_1NHE.shape[2:], into_1NHK.shape[-1]) if state_1HEK is None else state_1HEK
    outputs = []
    for token in range(x_1NHE.shape[1]):
        x, step = x_1NHE[:, token], step_1NH[:, token, :, None]
        state = state * left_1NH[:, token, :, None, None] + (x * step).unsqueeze(-1) * into_1NHK[:, token].unsqueeze(-2)
        outputs.append((state * out_1NHK[:, token].unsqueeze(-2)).sum(-1) + x * past_H.unsqueeze(-1))
    return torch.stack(outputs, dim=1), state
