"""The matrix of measurements for one CUDA GPU: ceilings, throughput, a whole step, the longest document, one long step.

    python recipes/bench/gpu.py [--sections A B C D E] [--model llama-3.1-8b] [--json FILE] [--toy]

    A  what the device does at most (gpu_ceilings.py)      B  forward + backward of every method, reduced layers
    C  all layers, with AdamW's step                       D  the longest document under a memory cap, predicted and tried
    E  one long step, split between device and host

Random weights of Llama's architecture in the named model's shapes, built on the device; random tokens; bf16. Every case is a
process of its own (with `--toy`, on small sizes, all run in this one), sections have time budgets, and what does not fit or
cannot run is a row that says so. Columns: tokens/s; causal model TFLOP/s; peak bytes of the device, weights included, measured
and (ours) predicted, and of pinned host memory; bytes per token that wait for backward in the layers, predicted by the plan's
formulae and measured by torch's hooks on 2048 tokens ('-' where hooks see nothing: slices, Hugging Face's offload); the loss;
attention's kernel by the profiler.

Causal model operations of S tokens: S (6 (L P + V d) + 6 a L S), with L layers of P matrix parameters, hidden d, vocabulary V
and a = heads x head size; recomputation never counts. With `--frozen` (as under LoRA: only norms are trained) 4 for the
first 6. (Others count attention without its mask, which doubles the second term.)
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_longctx.hf.layers import output_head
from hf_longctx.plan.activation import MemoryLimits
from hf_longctx.plan.activation_memory import checkpointed_layer_bytes, plain_layer_bytes, plan_activations
from hf_longctx.plan.catalog import named_model
from hf_longctx.plan.cost import CostModel, default_coefficients
from hf_longctx.plan.hardware import read_profile
from hf_longctx.plan.layer_memory import Load
from hf_longctx.plan.memory import chunk_bytes
from hf_longctx.plan.specs import ClusterSpec, ModelSpec
from hf_longctx.plan.types import ActivationPolicy, Chunk, GroupShape, LayerPolicy, Span
from hf_longctx.recipes.one_document import (
    PlannedDocument,
    attention_kernel,
    document_plan,
    next_tokens,
    plain_saved_bytes,
    plain_step,
    predicted_bytes,
    predicted_peak_bytes,
    replayed,
)
from hf_longctx.runtime.offload import HostTier
from hf_longctx.runtime.output_head import OutputHead

TOY = ModelSpec(2, 64, 96, 4, 2, 16, 256, 4096)
BUDGETS_S = {"A": 360, "B": 540, "C": 540, "D": 540, "E": 600}
# of a case's document, for its kernel's name and its saved bytes
PROBE_TOKENS = 2048
MARK = "OUTCOME "


@dataclass(frozen=True)
class Case:
    """One method on one document. cap_gib: of device memory (0: all of it); host_gib: the size of our slab."""

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
        spec = TOY if self.is_toy else named_model(self.model, 2)
        return replace(spec, num_layers=min(self.num_layers, spec.num_layers), tied_embeddings=False)


@dataclass(frozen=True)
class Outcome:
    """What a case came to. state: "ok", "out of memory", or why it has no numbers. Bytes of saved tensors are per token."""

    case: Case
    state: str
    step_s: float = 0.0
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
            f"{head} {self.step_s:9.3f} {case.num_tokens / self.step_s:9.0f} {model_operations(case) / self.step_s / 1e12:8.2f} "
            f"{self.device_bytes / 2**30:8.2f} {self.predicted_peak / 2**30:9.2f} {self.host_bytes / 2**30:8.2f} "
            f"{self.predicted_device:9.0f} + {self.predicted_host:<9.0f} {measured} {self.loss:8.4f}  {self.kernel}"
        )


HEADER = (
    f"{'':2s} {'method':32s} {'tokens':>8s} {'s/step':>9s} {'tokens/s':>9s} {'TFLOP/s':>8s} {'peak GiB':>8s} {'predicted':>9s} "
    f"{'host GiB':>8s} {'saved: device + host':>21s} {'measured':>9s} {'loss':>8s}  kernel"
)


def model_operations(case: Case) -> float:
    """Causal model operations of one step, without recomputation."""
    spec, tokens = case.spec, case.num_tokens
    matrices = spec.num_layers * spec.layer_parameters + spec.vocab_size * spec.hidden_size
    pairs = 6 * spec.num_layers * spec.num_heads * spec.head_dim * tokens
    return tokens * ((4 if case.is_frozen else 6) * matrices + pairs)


@dataclass(frozen=True)
class Runner:
    """A method on one document of the case's model: its step, and what it saves, predicted (device, host) and measured."""

    step: Callable[[], Tensor]
    predicted: tuple[int, int]
    saved_bytes: Callable[[], int]
    predicted_peak: int = 0
    tier: HostTier | None = None
    close: Callable[[], None] = lambda: None


def plain(model: Any, ids_1T: Tensor, case: Case) -> Runner:
    spec = case.spec
    predicted = plain_layer_bytes(spec) * spec.num_layers * ids_1T.shape[1]
    return Runner(lambda: plain_step(model, ids_1T), (predicted, 0), lambda: plain_saved_bytes(model, ids_1T))


def checkpointed(model: Any, ids_1T: Tensor, case: Case) -> Runner:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    predicted = checkpointed_layer_bytes(case.spec) * case.spec.num_layers * ids_1T.shape[1]
    return replace(plain(model, ids_1T, case), predicted=(predicted, 0))


def offloaded(model: Any, ids_1T: Tensor, case: Case) -> Runner:
    """Hugging Face's own: layer inputs in pinned host memory."""
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
    predicted = checkpointed_layer_bytes(case.spec) * case.spec.num_layers * ids_1T.shape[1]
    # its hooks come behind ours, which see nothing
    return replace(plain(model, ids_1T, case), predicted=(0, predicted), saved_bytes=lambda: 0)


def with_tiled_loss(runner: Callable[[Any, Tensor, Case], Runner]) -> Callable[[Any, Tensor, Case], Runner]:
    """The method with our loss in tiles: what is left between it and ours is not the logits."""

    def build(model: Any, ids_1T: Tensor, case: Case) -> Runner:
        head, labels_1T = OutputHead(output_head(model)), next_tokens(ids_1T)

        def step() -> Tensor:
            with head.summing(labels_1T, case.tile_tokens, keep_gradients=True):
                loss = model(input_ids=ids_1T, use_cache=False).logits / (ids_1T.shape[1] - 1)
            loss.backward()
            return loss.detach()

        return replace(runner(model, ids_1T, case), step=step, close=head.unbind)

    return build


def planned(layer: LayerPolicy | None, is_sliced: bool = False) -> Callable[[Any, Tensor, Case], Runner]:
    """Ours with this policy in all layers; None: what the linear program chooses for the case's memory."""

    def build(model: Any, ids_1T: Tensor, case: Case) -> Runner:
        spec, num_tokens = case.spec, ids_1T.shape[1]
        # a probe on fewer tokens has the case's own shares
        layers = (layer,) * spec.num_layers if layer is not None else split_layers(case, case.num_tokens)
        num_slices = max(2, -(-num_tokens // case.slice_tokens)) if is_sliced else 1
        plan = document_plan(num_tokens, layers, case.tile_tokens, num_slices)
        predicted = predicted_bytes(plan, spec)
        tier = slab_for(predicted[1], case, ids_1T.device) if predicted[1] else None
        document = PlannedDocument.of(model, ids_1T, plan, tier)
        measure = (lambda: 0) if is_sliced else document.saved_bytes
        peak = state_bytes(case) + predicted_peak_bytes(plan, spec, not case.is_frozen)
        return Runner(document.step, predicted, measure, peak, tier, document.close)

    return build


def slab_for(num_bytes: int, case: Case, device: torch.device) -> HostTier:
    """Host memory for so many bytes, with a little for the pieces they come in; ValueError above the case's."""
    if num_bytes > case.host_gib * 2**30:
        raise ValueError(f"{num_bytes / 2**30:.1f} GiB go to the host, which has {case.host_gib:g} for it (--host-gib)")
    return HostTier.on(device, int(1.01 * num_bytes) + 2**20)


def split_layers(case: Case, num_tokens: int) -> tuple[LayerPolicy, ...]:
    """The linear program's shares where saved tensors may take what weights and the layer at work leave of the device."""
    spec, hardware = case.spec, read_profile(case.hardware).spec
    cluster = ClusterSpec(1, 1, hardware)
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    limits = MemoryLimits(device_room(case, num_tokens), 0.98 * case.host_gib * 2**30, hardware.copy_bytes_per_s)
    policy, _ = plan_activations(costs, Chunk(0, (Span(0, 0, num_tokens),)), GroupShape(1), limits, case.tile_tokens)
    return policy.layers or (LayerPolicy(),) * spec.num_layers


def device_room(case: Case, num_tokens: int) -> float:
    """Bytes of the device that saved tensors may take; on the CPU so few that a toy has to split."""
    spec = case.spec
    if not torch.cuda.is_available():
        return 1.5 * checkpointed_layer_bytes(spec) * spec.num_layers * num_tokens
    layers = (replayed(),) * spec.num_layers
    load = Load.document(num_tokens, spec.num_layers, trains_weights=not case.is_frozen)
    workspace = chunk_bytes(spec, load, ActivationPolicy(0, 0, layers, case.tile_tokens)).workspace
    total = case.cap_gib * 2**30 or device_total()
    return max(0.0, 0.95 * total - state_bytes(case) - workspace)


def state_bytes(case: Case) -> int:
    """Weights; where they are trained, gradients; with an optimizer, its two moments."""
    copies = 1 if case.is_frozen else 4 if case.has_optimizer else 2
    return case.spec.num_parameters * case.spec.bytes_per_element * copies


def device_total() -> int:
    return torch.cuda.get_device_properties(0).total_memory


METHODS: dict[str, Callable[[Any, Tensor, Case], Runner]] = {
    "HF plain": plain,
    "HF checkpointing": checkpointed,
    "HF checkpointing, tiled loss": with_tiled_loss(checkpointed),
    "HF checkpointing, Liger": checkpointed,
    "HF offload": offloaded,
    "HF offload, tiled loss": with_tiled_loss(offloaded),
    "ours, attention on the device": planned(replayed()),
    "ours, attention on the host": planned(replayed(attention_host=1.0)),
    "ours, all on the host": planned(replayed(attention_host=1.0, input_host=1.0)),
    "ours, split by the program": planned(None),
    "ours, attention run again": planned(replayed(attention_recompute=1.0)),
    "ours, sliced": planned(replayed(), is_sliced=True),
}
OURS = "ours, attention on the device"
SPLIT = "ours, split by the program"


def cannot_run(case: Case) -> str:
    """Why this machine has no numbers for the case; empty if it can try."""
    if "Liger" in case.method and importlib.util.find_spec("liger_kernel") is None:
        return "skipped: liger-kernel is not installed"
    if ("Liger" in case.method or "offload" in case.method) and not torch.cuda.is_available():
        return "skipped: needs CUDA"
    if case.cap_gib and not torch.cuda.is_available():
        return "skipped: a cap of device memory needs CUDA"
    return ""


def run_case(case: Case) -> Outcome:
    """The case in this process. Out of memory is an outcome; so is any other failure, which must not hide the rest."""
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
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5) if case.has_optimizer else None
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
    seconds = []
    for _ in range(case.steps):
        model.zero_grad(set_to_none=True)
        start_s = time.perf_counter()
        loss = runner.step()
        if optimizer is not None:
            optimizer.step()
        # waits for the device
        value = float(loss)
        seconds.append(time.perf_counter() - start_s)
    runner.close()
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) if is_cuda else 0
    device_saved, host_saved = runner.predicted
    return Outcome(
        case,
        "ok",
        # the first step of several makes plans of kernels and grows pools
        median(seconds[1:] or seconds),
        kernel,
        torch.cuda.max_memory_allocated() if is_cuda else 0,
        runner.predicted_peak,
        torch.cuda.max_memory_reserved() if is_cuda else 0,
        pinned + (runner.tier.peak_bytes if runner.tier is not None else 0),
        device_saved / case.num_tokens,
        host_saved / case.num_tokens,
        measured,
        value,
    )


def build(case: Case, device: torch.device) -> Any:
    """Random weights on the device, the same in every process."""
    spec = case.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=1 << 21,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if case.is_frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    return model.train()


def tokens(case: Case, num_tokens: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, case.spec.vocab_size, (1, num_tokens), generator=generator).to(device)


class Section:
    """One section's cases, run until its time is up, each in a process of its own unless it is a toy."""

    def __init__(self, name: str, budget_s: float) -> None:
        self.name, self.deadline_s = name, time.monotonic() + budget_s
        self.outcomes: list[Outcome] = []

    def run(self, case: Case) -> Outcome:
        left_s = self.deadline_s - time.monotonic()
        if problem := cannot_run(case):
            outcome = Outcome(case, problem)
        elif left_s <= 0:
            outcome = Outcome(case, "skipped: the section's time is up")
        elif case.is_toy:
            outcome = run_case(case)
        else:
            outcome = in_process(case, left_s)
        print(outcome, flush=True)
        self.outcomes.append(outcome)
        return outcome


def in_process(case: Case, timeout_s: float) -> Outcome:
    """The case in a fresh process, so that no method inherits another's memory pools or patches."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", json.dumps(asdict(case))]
    # one large block is cut as needed instead of one segment per size
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Outcome(case, f"stopped: the section's last {timeout_s:.0f} s were not enough")
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return Outcome(case, f"failed: exit status {done.returncode}: {last[0]}")
    found = json.loads(line.removeprefix(MARK))
    return Outcome(case, **{name: value for name, value in found.items() if name != "case"})


def throughput(section: Section, base: Case, lengths: Sequence[int]) -> None:
    """B: every method at every length."""
    for num_tokens in lengths:
        for method in METHODS:
            section.run(replace(base, method=method, num_tokens=num_tokens))


def whole_step(section: Section, base: Case, num_tokens: int, num_layers: int) -> None:
    """C: all layers and the optimizer's step, the strongest of Hugging Face's against ours; losses side by side."""
    for method in ("HF checkpointing, tiled loss", "HF offload, tiled loss", OURS, SPLIT):
        section.run(replace(base, method=method, num_tokens=num_tokens, num_layers=num_layers, has_optimizer=True))


def longest(section: Section, base: Case, lengths: tuple[int, int], cap_gib: float) -> None:
    """D: bytes per token from two lengths say what fits under the cap; 0.97 of it must, 1.03 of it must not."""
    methods = ("HF checkpointing", "HF checkpointing, tiled loss", "HF offload, tiled loss", OURS, "ours, all on the host")
    for method in methods:
        short, long = (section.run(replace(base, method=method, num_tokens=n, steps=1)) for n in lengths)
        if not short.device_bytes or not long.device_bytes:
            continue
        token_bytes = (long.device_bytes - short.device_bytes) / (lengths[1] - lengths[0])
        fixed_bytes = short.device_bytes - token_bytes * lengths[0]
        limit = int((cap_gib * 2**30 - fixed_bytes) / token_bytes)
        print(
            f"D  {method:32s} {token_bytes:.0f} bytes/token beside {fixed_bytes / 2**30:.2f} GiB: "
            f"{limit} tokens in {cap_gib:g} GiB"
        )
        for share in (0.97, 1.03):
            case = replace(base, method=method, num_tokens=int(share * limit), steps=1, cap_gib=cap_gib)
            fits = section.run(case).state == "ok"
            print(f"D  {method:32s} at {share:g} of its limit: {'fits' if fits else 'does not fit'}, predicted to "
                  f"{'fit' if share < 1 else 'not fit'}")  # fmt: skip
    if not torch.cuda.is_available():
        return
    num_tokens = longest_split(replace(base, method=SPLIT, cap_gib=cap_gib))
    print(
        f"D  {SPLIT:32s} the program finds shares up to {num_tokens} tokens in {cap_gib:g} GiB and {base.host_gib:g} GiB of host"
    )
    section.run(replace(base, method=SPLIT, num_tokens=int(0.97 * num_tokens), steps=1, cap_gib=cap_gib))


def longest_split(case: Case) -> int:
    """Most tokens, in steps of 1024, for which the program has an answer."""

    def has_answer(thousands: int) -> bool:
        try:
            return bool(split_layers(case, thousands * 1024))
        except ValueError:
            return False

    low, high = 0, 1 << 14
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_answer(middle) else (low, middle)
    return low * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the sections' tables."""
    options = parse(arguments)
    # the name that every supported version knows is deprecated in the newest
    warnings.filterwarnings("ignore", category=FutureWarning)
    if options.case:
        print(MARK + json.dumps(asdict(run_case(Case(**json.loads(options.case))))))
        return
    if not (options.toy or torch.cuda.is_available()):
        print("skipped: torch sees no CUDA device, and every section measures one (--toy runs small sizes on the CPU)")
        return
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, toy sizes: these numbers say nothing about speed"
    print(f"{name}; torch {torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}")
    found = run_sections(options)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in found], indent=1))


def run_sections(options: argparse.Namespace) -> list[Outcome]:
    shared = {"model": options.model, "hardware": options.hardware, "host_gib": 2**-6 if options.toy else options.host_gib}
    base = Case("B", OURS, 0, num_layers=options.layers, is_frozen=options.frozen, is_toy=options.toy, **shared)
    if options.toy:
        base = replace(base, tile_tokens=32, slice_tokens=64)
    lengths = (96, 128) if options.toy else tuple(options.lengths)
    found: list[Outcome] = []
    for name in options.sections:
        print(f"\nsection {name}\n{HEADER if name != 'A' else ''}", flush=True)
        section = Section(name, options.budget_s or BUDGETS_S[name])
        case = replace(base, section=name)
        if name == "A":
            run_ceilings(options, section)
        elif name == "B":
            throughput(section, case, lengths[:1] if options.toy else lengths)
        elif name == "C":
            whole_step(section, case, lengths[-1] if options.toy else options.step_tokens, 10**6)
        elif name == "D":
            longest(section, case, (lengths[0], lengths[-1]) if options.toy else (8192, 16384), options.cap_gib)
        else:
            num_tokens = lengths[-1] if options.toy else options.long_tokens
            section.run(replace(case, method=SPLIT, num_tokens=num_tokens, num_layers=10**6, steps=1))
        found += section.outcomes
    return found


def run_ceilings(options: argparse.Namespace, section: Section) -> None:
    """A, by the script beside this one; its rows go to a file beside `--json`'s."""
    script = Path(__file__).resolve().with_name("gpu_ceilings.py")
    command = ["--model", options.model, *(["--toy"] if options.toy else [])]
    if options.json is not None:
        command += ["--json", str(options.json.with_suffix(".ceilings.json"))]
    if options.toy:
        runpy.run_path(str(script))["main"](command)
        return
    try:
        subprocess.run([sys.executable, str(script), *command], timeout=section.deadline_s - time.monotonic())
    except subprocess.TimeoutExpired:
        print("A  stopped: the section's time is up")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=list(BUDGETS_S), default=list(BUDGETS_S))
    parser.add_argument("--model", default="llama-3.1-8b", help="a named shape of the catalogue (default: llama-3.1-8b)")
    parser.add_argument("--hardware", default="h200", help="the profile that the program of shares prices by (default: h200)")
    parser.add_argument("--layers", type=int, default=8, help="layers in B and D (default: 8); C and E have all")
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 131072, 262144], help="tokens of a document in B")
    parser.add_argument("--step-tokens", type=int, default=131072, help="tokens of the document in C (default: 131072)")
    parser.add_argument("--long-tokens", type=int, default=393216, help="tokens of the document in E (default: 393216)")
    parser.add_argument("--frozen", action="store_true", help="train norms only, as LoRA leaves large weights alone")
    parser.add_argument("--host-gib", type=float, default=64.0, help="GiB of host memory for saved tensors (default: 64)")
    parser.add_argument("--cap-gib", type=float, default=40.0, help="GiB of device memory in D (default: 40)")
    parser.add_argument("--budget-s", type=float, default=0.0, help="seconds of every section (default: 360 to 600)")
    parser.add_argument("--json", type=Path, default=None, help="also write the outcomes to this file")
    parser.add_argument("--toy", action="store_true", help="small sizes, in one process, on the CPU where there is no GPU")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
