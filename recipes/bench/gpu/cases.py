"""The cases that `matrix.py` measures: methods of training on one long document. Runs one case and returns its row.

The methods are Hugging Face's (plain, checkpointed, with Liger, with flash-attn, offloaded; for a fair comparison also with our
loss in tiles), torch's selective checkpointing that keeps attention (set up here, and by TRL's `selective`), MLPs in tiles as in
ALST (arXiv 2506.13996), and ours (attention output on the device, on the host, split by the linear program, in slices).
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from hf_longctx.hf.calibration.calibrate import shaped_config
from hf_longctx.hf.models.layers import output_head
from hf_longctx.plan.core.settings import USABLE_SHARE, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import LayerPolicy, RankPlan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients, training_operations
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.saved_tensors import plain_layer_bytes
from hf_longctx.plan.model.model_spec import AdapterSpec, ModelSpec
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.pipeline_run import run_alone
from hf_longctx.recipes.bench.one_document import (
    PlannedDocument,
    attention_kernel,
    checkpointed_layer_bytes,
    document_plan,
    keep_attention,
    keep_attention_by_trl,
    next_tokens,
    plain_saved_bytes,
    plain_step,
    predicted_bytes,
    predicted_peak_bytes,
    replayed,
    selective_layer_bytes,
)
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.core.loss import Targets

TOY = ModelSpec(2, 64, 96, 4, 2, 16, 256, 4096)
# tokens of the document on which a case's attention kernel and saved bytes are found
PROBE_TOKENS = 2048


@dataclass(frozen=True)
class Case:
    """One method on one document.

    cap_gib: device memory that may be used, 0 for all of it. host_gib: most host memory for our offloaded tensors.
    """

    section: str
    method: str
    num_tokens: int
    model: str = "llama-3.1-8b"
    hardware: str = "h200"
    num_layers: int = 8
    steps: int = 2
    tile_tokens: int = 2048
    slice_tokens: int = 8192
    is_frozen: bool = False
    has_optimizer: bool = False
    is_toy: bool = False
    cap_gib: float = 0.0
    host_gib: float = 64.0

    @property
    def spec(self) -> ModelSpec:
        # models are built in bf16 on CUDA, and in fp32 elsewhere
        toy = replace(TOY, bytes_per_element=2 if torch.cuda.is_available() else 4)
        spec = toy if self.is_toy else named_model(self.model, 2)
        # the model is always a Llama, which has no query and key norms
        spec = replace(spec, num_layers=min(self.num_layers, spec.num_layers), tied_embeddings=False, qk_norms=False)
        return replace(spec, adapters=norms_alone(spec)) if self.is_frozen else spec


@dataclass(frozen=True)
class Outcome:
    """Result of a case.

    state: "ok", "out of memory", or why there are no numbers. predicted_device, predicted_host, measured: bytes per token that
    the layers hold for backward. predicted_s: seconds of forward and backward by the cost model, without the optimizer.
    """

    case: Case
    state: str
    step_s: float = 0.0
    predicted_s: float = 0.0
    kernel: str = "-"
    device_bytes: int = 0
    predicted_peak: int = 0
    reserved_bytes: int = 0
    host_bytes: int = 0
    predicted_device: float = 0.0
    predicted_host: float = 0.0
    measured: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        case = self.case
        head = f"{case.section}  {case.method:32s} {case.num_tokens:8d}"
        if self.state != "ok":
            return f"{head}  {self.state}"
        measured = f"{self.measured:9.0f}" if self.measured else f"{'-':>9s}"
        return (
            f"{head} {self.step_s:9.3f} {self.predicted_s:9.3f} {case.num_tokens / self.step_s:9.0f} "
            f"{model_operations(case) / self.step_s / 1e12:8.2f} "
            f"{self.device_bytes / 2**30:8.2f} {self.predicted_peak / 2**30:9.2f} {self.host_bytes / 2**30:8.2f} "
            f"{self.predicted_device:9.0f} + {self.predicted_host:<9.0f} {measured} {self.loss:8.4f}  {self.kernel}"
        )


HEADER = (
    f"{'':2s} {'method':32s} {'tokens':>8s} {'s/step':>9s} {'predicted':>9s} {'tokens/s':>9s} {'TFLOP/s':>8s} "
    f"{'peak GiB':>8s} {'predicted':>9s} "
    f"{'host GiB':>8s} {'saved: device + host':>21s} {'measured':>9s} {'loss':>8s}  kernel"
)


def model_operations(case: Case) -> float:
    """Operations of one step on the model, with causal attention and without recomputation."""
    return training_operations([case.num_tokens], case.spec)


def norms_alone(spec: ModelSpec) -> AdapterSpec:
    """Sizes of the norms of a layer, which are all that is trained, and of their products before the weight."""
    count, num_bytes = 2 * spec.hidden_size, 2 * spec.hidden_size * spec.bytes_per_element
    return AdapterSpec(count, num_bytes, attention_saved_bytes=num_bytes)


@dataclass(frozen=True)
class Runner:
    """A method on one document: its step, and the bytes it holds for backward, predicted (device, host) and measured.

    predicted_s: seconds of the step by the cost model, without the optimizer.
    """

    step: Callable[[], Tensor]
    predicted: tuple[int, int]
    saved_bytes: Callable[[], int]
    predicted_s: float
    predicted_peak: int = 0
    tier: HostTier | None = None
    close: Callable[[], None] = lambda: None


def plain(model: Any, ids_1T: Tensor, case: Case) -> Runner:
    spec = case.spec
    predicted = plain_layer_bytes(spec) * spec.num_layers * ids_1T.shape[1]
    seconds = predicted_s(LayerPolicy(), ids_1T, case)
    return Runner(lambda: plain_step(model, ids_1T), (predicted, 0), lambda: plain_saved_bytes(model, ids_1T), seconds)


def checkpointed(model: Any, ids_1T: Tensor, case: Case) -> Runner:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    predicted = checkpointed_layer_bytes(case.spec) * case.spec.num_layers * ids_1T.shape[1]
    seconds = predicted_s(replayed(attention_recompute=1.0), ids_1T, case)
    return replace(plain(model, ids_1T, case), predicted=(predicted, 0), predicted_s=seconds)


def offloaded(model: Any, ids_1T: Tensor, case: Case) -> Runner:
    """Hugging Face's offloading: checkpointing with layer inputs in pinned host memory."""
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
    predicted = checkpointed_layer_bytes(case.spec) * case.spec.num_layers * ids_1T.shape[1]
    seconds = predicted_s(replayed(attention_recompute=1.0, input_host=1.0), ids_1T, case)
    # its hooks run after ours, which therefore see nothing
    return replace(plain(model, ids_1T, case), predicted=(0, predicted), saved_bytes=lambda: 0, predicted_s=seconds)


def selective(model: Any, ids_1T: Tensor, case: Case) -> Runner:
    """torch's selective checkpointing, which keeps what attention returns and recomputes all else."""
    keep_attention(model)
    return _keeping_attention(model, ids_1T, case)


def trl_selective(model: Any, ids_1T: Tensor, case: Case) -> Runner:
    """TRL's selective checkpointing."""
    keep_attention_by_trl(model)
    return _keeping_attention(model, ids_1T, case)


def _keeping_attention(model: Any, ids_1T: Tensor, case: Case) -> Runner:
    spec = case.spec
    predicted = selective_layer_bytes(spec, element_bytes(model)) * spec.num_layers * ids_1T.shape[1]
    seconds = predicted_s(replayed(), ids_1T, case)
    # attention is kept in a cache of torch's own, where our hooks do not look
    return replace(plain(model, ids_1T, case), predicted=(predicted, 0), saved_bytes=lambda: 0, predicted_s=seconds)


def element_bytes(model: Any) -> int:
    """Bytes of an element of the model's activations."""
    return int(next(model.parameters()).element_size())


def with_tiled_mlp(runner: Callable[[Any, Tensor, Case], Runner]) -> Callable[[Any, Tensor, Case], Runner]:
    """Gives a method MLPs that run tile by tile of the tokens, each tile recomputed in backward, as in ALST."""

    def build(model: Any, ids_1T: Tensor, case: Case) -> Runner:
        mlps = [layer.mlp for layer in model.model.layers]
        for mlp in mlps:
            mlp.forward = partial(_in_tiles, type(mlp).forward.__get__(mlp), case.tile_tokens)

        def close() -> None:
            for mlp in mlps:
                del mlp.forward
            found.close()

        found = runner(model, ids_1T, case)
        return replace(found, close=close)

    return build


def _in_tiles(forward: Callable[[Tensor], Tensor], tile_tokens: int, x_1TC: Tensor) -> Tensor:
    tiles = [checkpoint(forward, tile, use_reentrant=False) for tile in x_1TC.split(tile_tokens, dim=1)]
    return torch.cat(tiles, dim=1)


def with_tiled_loss(runner: Callable[[Any, Tensor, Case], Runner]) -> Callable[[Any, Tensor, Case], Runner]:
    """Gives a method our loss in tiles, so that its difference from ours is not due to logits."""

    def build(model: Any, ids_1T: Tensor, case: Case) -> Runner:
        head, labels_1T = OutputHead(output_head(model)), next_tokens(ids_1T)

        def step() -> Tensor:
            with head.summing(Targets(labels_1T), case.tile_tokens, keep_gradients=True):
                loss = model(input_ids=ids_1T, use_cache=False).logits / (ids_1T.shape[1] - 1)
            loss.backward()
            return loss.detach()

        return replace(runner(model, ids_1T, case), step=step, close=head.unbind)

    return build


def planned(layer: LayerPolicy | None, is_sliced: bool = False) -> Callable[[Any, Tensor, Case], Runner]:
    """Our engine with this policy in all layers; None: with the policy that the linear program chooses for the case's memory."""

    def build(model: Any, ids_1T: Tensor, case: Case) -> Runner:
        spec, num_tokens = case.spec, ids_1T.shape[1]
        # a probe on fewer tokens uses the shares of the whole document
        layers = (layer,) * spec.num_layers if layer is not None else split_layers(case, case.num_tokens)
        num_slices = max(2, -(-num_tokens // case.slice_tokens)) if is_sliced else 1
        plan = document_plan(num_tokens, layers, own_tile(case), num_slices)
        predicted = predicted_bytes(plan, spec)
        tier = slab_for(predicted[1], case, ids_1T.device) if predicted[1] else None
        document = PlannedDocument.of(model, ids_1T, plan, tier)
        measure = (lambda: 0) if is_sliced else document.saved_bytes
        peak = state_bytes(case) + predicted_peak_bytes(plan, spec)
        return Runner(document.step, predicted, measure, plan_s(plan, case), peak, tier, document.close)

    return build


def predicted_s(layer: LayerPolicy, ids_1T: Tensor, case: Case) -> float:
    """Seconds of forward and backward by the cost model, if every layer keeps and recomputes what this policy does."""
    return plan_s(document_plan(ids_1T.shape[1], (layer,) * case.spec.num_layers), case)


def plan_s(plan: RankPlan, case: Case) -> float:
    """Seconds of a plan's forwards and backwards by the cost model, at the rates of the case's hardware profile."""
    ((group, _),) = plan.rounds
    return run_alone(group, case_costs(case)).times[-1][1]


def case_costs(case: Case) -> CostModel:
    """Costs of the case's model on one device of its hardware."""
    cluster = ClusterSpec(1, 1, read_profile(case.hardware).spec)
    return CostModel(case.spec, cluster, default_coefficients(case.spec, cluster))


def slab_for(num_bytes: int, case: Case, device: torch.device) -> HostTier:
    """Host memory for this many bytes and a little more for fragmentation; ValueError if that is above the case's limit."""
    if num_bytes > case.host_gib * 2**30:
        raise ValueError(f"{num_bytes / 2**30:.1f} GiB would go to the host, but --host-gib allows {case.host_gib:g}; raise it")
    return HostTier.on(device, int(1.01 * num_bytes) + 2**20)


def split_layers(case: Case, num_tokens: int) -> tuple[LayerPolicy, ...]:
    """The policies that a run would plan for this document: with the device's memory beside the states, and the host's."""
    budget = ByteModel(case.spec).budget(int(planned_bytes(case, num_tokens)), int(case.host_gib * 2**30), own_tile(case))
    plan = plan_step(0, [num_tokens], case_costs(case), PlannerConfig(num_tokens, (1,), activations=budget))
    policies = plan.micro_batches[0].groups[0].stages[0].activations
    return (policies[0].layers if policies else ()) or (LayerPolicy(),) * case.spec.num_layers


def planned_bytes(case: Case, num_tokens: int) -> float:
    """Bytes of the device beside the states; on the CPU what keeping attention takes, so that a toy case has to split."""
    if torch.cuda.is_available():
        return max(0.0, usable_bytes(case))
    plan = document_plan(num_tokens, (replayed(),) * case.spec.num_layers, case.tile_tokens)
    return predicted_peak_bytes(plan, case.spec)


def usable_bytes(case: Case) -> float:
    """Bytes of the device beside the states."""
    return USABLE_SHARE * (case.cap_gib * 2**30 or device_total()) - state_bytes(case)


def own_tile(case: Case) -> int:
    """Tokens per tile of our norms and MLPs: as many as a run would take, or the toy's."""
    if case.is_toy or not torch.cuda.is_available():
        return case.tile_tokens
    return ByteModel(case.spec).tile_tokens(int(usable_bytes(case)))


def state_bytes(case: Case) -> int:
    """Bytes of weights, of gradients if weights are trained, and of the two moments if there is an optimizer."""
    copies = 1 if case.is_frozen else 4 if case.has_optimizer else 2
    return case.spec.num_parameters * case.spec.bytes_per_element * copies


def device_total() -> int:
    return torch.cuda.get_device_properties(0).total_memory


METHODS: dict[str, Callable[[Any, Tensor, Case], Runner]] = {
    "HF plain": plain,
    "HF checkpointing": checkpointed,
    "HF checkpointing, tiled loss": with_tiled_loss(checkpointed),
    "HF checkpointing, Liger": checkpointed,
    "HF checkpointing, flash-attn": checkpointed,
    "HF offload": offloaded,
    "HF offload, tiled loss": with_tiled_loss(offloaded),
    "selective checkpointing, tiled loss": with_tiled_loss(selective),
    "TRL selective, tiled loss": with_tiled_loss(trl_selective),
    "tiled MLP and loss": with_tiled_mlp(with_tiled_loss(checkpointed)),
    "HF offload, tiled MLP and loss": with_tiled_mlp(with_tiled_loss(offloaded)),
    "ours, attention on the device": planned(replayed()),
    "ours, attention on the host": planned(replayed(attention_host=1.0)),
    "ours, all on the host": planned(replayed(attention_host=1.0, input_host=1.0)),
    "ours, split by the program": planned(None),
    "ours, attention run again": planned(replayed(attention_recompute=1.0)),
    "ours, sliced": planned(replayed(), is_sliced=True),
}
OURS = "ours, attention on the device"
SPLIT = "ours, split by the program"


def estimated_s(case: Case) -> float:
    """Seconds that a case takes at six tenths of its hardware's rates, with a process's start and every forward run twice."""
    hardware = read_profile(case.hardware).spec
    passes = (case.steps + min(1.0, PROBE_TOKENS / case.num_tokens)) * 4 / 3
    return 25.0 + passes * model_operations(case) / (0.6 * hardware.attention_flops_per_s)


def cannot_run(case: Case) -> str:
    """Explains why this machine cannot measure the case; empty if it can try."""
    if "Liger" in case.method and importlib.util.find_spec("liger_kernel") is None:
        return "skipped: liger-kernel is not installed"
    if "TRL" in case.method and importlib.util.find_spec("trl") is None:
        return "skipped: trl is not installed (pip install trl==1.16.0)"
    if "flash-attn" in case.method and importlib.util.find_spec("flash_attn") is None:
        return "skipped: flash-attn is not installed; --peer-venv names an environment that has it"
    if any(word in case.method for word in ("Liger", "flash-attn", "offload")) and not torch.cuda.is_available():
        return "skipped: needs CUDA"
    if case.cap_gib and not torch.cuda.is_available():
        return "skipped: a cap of device memory needs CUDA"
    return ""


def run_case(case: Case) -> Outcome:
    """Runs the case in this process; out of memory and all other failures are outcomes, too, so that the rest still runs."""
    if problem := cannot_run(case):
        return Outcome(case, problem)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return _run(case, device)
    except torch.OutOfMemoryError:
        return Outcome(case, "out of memory")
    except Exception as failure:
        return Outcome(case, f"failed: {type(failure).__name__}: {failure}".split("\n")[0])


def _run(case: Case, device: torch.device) -> Outcome:
    is_cuda = device.type == "cuda"
    if case.cap_gib:
        torch.cuda.set_per_process_memory_fraction(case.cap_gib * 2**30 / device_total())
    if "Liger" in case.method:
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    model = build(case, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # fused on CUDA, because the other implementations hold copies of all states while they work
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=is_cuda) if case.has_optimizer else None
    probe = METHODS[case.method](model, tokens(case, min(PROBE_TOKENS, case.num_tokens), device), case)
    kernel = attention_kernel(probe.step, device)
    model.zero_grad(set_to_none=True)
    measured = probe.saved_bytes() / min(PROBE_TOKENS, case.num_tokens)
    probe.close()
    del probe
    gc.collect()
    runner = METHODS[case.method](model, tokens(case, case.num_tokens, device), case)
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_peak_host_memory_stats()
    step_s, loss = timed(runner, model, optimizer, case.steps)
    runner.close()
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) if is_cuda else 0
    device_saved, host_saved = runner.predicted
    return Outcome(
        case,
        "ok",
        step_s,
        runner.predicted_s,
        kernel,
        torch.cuda.max_memory_allocated() if is_cuda else 0,
        runner.predicted_peak,
        torch.cuda.max_memory_reserved() if is_cuda else 0,
        pinned + (runner.tier.peak_bytes if runner.tier is not None else 0),
        device_saved / case.num_tokens,
        host_saved / case.num_tokens,
        measured,
        loss,
    )


def timed(runner: Runner, model: Any, optimizer: torch.optim.Optimizer | None, num_steps: int) -> tuple[float, float]:
    """Runs steps; returns (median seconds of a step, loss of the last). The first of several steps does not count."""
    seconds = []
    for _ in range(num_steps):
        model.zero_grad(set_to_none=True)
        start_s = time.perf_counter()
        loss = runner.step()
        if optimizer is not None:
            optimizer.step()
        # reading the loss waits for the device
        value = float(loss)
        seconds.append(time.perf_counter() - start_s)
    # the first step also sets up kernels and memory pools
    return median(seconds[1:] or seconds), value


def build(case: Case, device: torch.device) -> Any:
    """Builds the case's model on the device, with the same random weights in every process."""
    spec = case.spec
    config = shaped_config(replace(spec, max_positions=1 << 21))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = "flash_attention_2" if "flash-attn" in case.method else "sdpa"
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if case.is_frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    return model.train()


def tokens(case: Case, num_tokens: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, case.spec.vocab_size, (1, num_tokens), generator=generator).to(device)
