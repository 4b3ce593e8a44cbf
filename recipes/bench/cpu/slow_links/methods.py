"""Runs every method on one rank: one step that does not count, then the same steps for all, and their seconds and losses.

`compare.py` forks it as every rank; rank 0 writes a `Measurement` for every method and round. All methods train the same Llama
from the same weights on the same documents, with AdamW in fp32.

    planned             `LongContextTrainer`, which plans every step on one stage, with whole weights on every rank
    planned, sharded    the same with weights sharded over all ranks
    planned, gathered_per_node    the same, of which each node keeps a copy for a step
    2 stages, <p>       `LongContextTrainer` with two stages, one on each node, whose ranks share weights: parameters p
    auto stages         `LongContextTrainer` with sharded weights on as many stages as it predicts to be fastest
    fixed <d>           `LongContextTrainer` with groups of d ranks in every plan (solver "static")
    DeepSpeed <d>       attention by DeepSpeed's `UlyssesSPAttentionHF`, one document at a time on d ranks, filled up to a
                        multiple of d; groups of d ranks get equally many documents. As its engine does without ZeRO, gradients
                        are summed over all ranks once, after the last document
    flattening, DDP     `Trainer` with `DataCollatorWithFlattening`: each rank has equally many documents in one row, for which
                        sdpa builds a dense mask
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.hf.calibration.calibrate import CalibrationRequest, calibrate, calibration_text
from hf_longctx.hf.models.spec import cluster_spec, model_spec
from hf_longctx.journal import read_journal
from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.profiles import profile_to_json, read_profile
from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.planner import build_plan, plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.planning import Planning, weight_seconds
from hf_longctx.plan.setup import Setup
from hf_longctx.recipes.bench.cpu.slow_links.network import limit_cores

PLANNED, FIXED, DEEPSPEED, FLATTENING = "planned", "fixed", "DeepSpeed", "flattening, DDP"
SHARDED = f"{PLANNED}, sharded"
# methods of one stage whose weights are sharded
ONE_STAGE = SHARDED, f"{PLANNED}, gathered_per_node"
STAGED = tuple(f"2 stages, {parameters}" for parameters in ("sharded", "gathered_per_step"))
AUTO = "auto stages"
# tokens of every document in the first step, which does not count
_FIRST_TOKENS = 32
_TIMEOUT_S = 180.0
_LEARNING_RATE = 1e-4
# runs of a chunk that the cost model is fitted to: with a fixed share of a core, long chunks matter more than many runs
_REPEATS = 2


@dataclass(frozen=True)
class Job:
    """Everything that ranks need to know.

    lengths: tokens of the documents of each step that counts. methods: names, each with the most tokens that a rank may hold (0
    for methods that keep no such limit). calibrate_s: seconds for measuring the cost model.
    """

    folder: str
    config: dict[str, Any]
    lengths: list[list[int]]
    methods: list[tuple[str, int]]
    rounds: int
    calibrate_s: float

    @property
    def profile(self) -> Path:
        return Path(self.folder) / "hardware.json"

    @property
    def calibration(self) -> Path:
        return Path(self.folder) / "calibration.txt"

    @property
    def results(self) -> Path:
        return Path(self.folder) / "results.jsonl"


@dataclass(frozen=True)
class Measurement:
    """One method in one round: seconds and losses of the steps that count, and what the cost model said before (0: nothing)."""

    method: str
    tokens_per_rank: int
    round: int
    step_s: list[float]
    losses: list[float]
    predicted_s: list[float]
    layouts: list[str]


def run_job(job: Job) -> None:
    """Runs the job as one rank."""
    torch.set_num_threads(1)
    # the trainers end in it too, and a rank ends with its process
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    if any(name.startswith(DEEPSPEED) for name, _ in job.methods):
        load_deepspeed()
    measure_machine(job)
    for number in range(job.rounds):
        for name, tokens_per_rank in job.methods if number % 2 == 0 else reversed(job.methods):
            found = replace(measure(job, name, tokens_per_rank), round=number)
            limit_cores(Path(job.folder), False)
            if dist.get_rank() == 0:
                with job.results.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
    dist.barrier()


def measure_machine(job: Job) -> None:
    """Writes the profile of this machine and model, with rates of these links."""
    file = Path(job.folder) / "config.json"
    if dist.get_rank() == 0:
        file.write_text(json.dumps({"model_type": "llama", **job.config}))
    limit_cores(Path(job.folder), True)
    calibration = calibrate(CalibrationRequest(str(file), "float32", time.time() + job.calibrate_s, _REPEATS))
    if dist.get_rank() == 0:
        job.profile.write_text(profile_to_json(calibration.profile))
        job.calibration.write_text(calibration_text(calibration))
    limit_cores(Path(job.folder), False)


def documents(job: Job) -> list[list[list[int]]]:
    """Token ids of the documents of every step, the first one with the beginnings of the second's."""
    generator = np.random.default_rng(0)
    steps = [[generator.integers(5, job.config["vocab_size"], n).tolist() for n in lengths] for lengths in job.lengths]
    return [[row[:_FIRST_TOKENS] for row in steps[0]], *steps]


def build_model(job: Job) -> PreTrainedModel:
    """Builds the model, with the same weights at every call."""
    set_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**job.config), attn_implementation="sdpa").train()


def measure(job: Job, name: str, tokens_per_rank: int) -> Measurement:
    """Runs all steps with one method. Collective."""
    dist.barrier()
    kind, _, degree = name.partition(" <")
    if kind == DEEPSPEED:
        return with_deepspeed(job, name, int(degree.rstrip(">")))
    return with_trainer(job, name, tokens_per_rank)


class StepEnds(TrainerCallback):
    """Records when every optimizer step has ended, and limits cores after the first one, before its time is taken."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.times_s: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if not self.times_s:
            limit_cores(Path(self.job.folder), True)
        self.times_s.append(time.perf_counter())


def with_trainer(job: Job, name: str, tokens_per_rank: int) -> Measurement:
    """Trains with a trainer, ours or the stock one."""
    steps, ends = documents(job), StepEnds(job)
    rows = datasets.Dataset.from_dict({"input_ids": [row for step in steps for row in step]})
    with shared_folder() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=len(steps[0]) // dist.get_world_size(),
            max_steps=len(steps),
            train_sampling_strategy="sequential",
            learning_rate=_LEARNING_RATE,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        given = {"model": build_model(job), "args": args, "train_dataset": rows, "callbacks": [ends]}
        if name == FLATTENING:
            trainer: Trainer = Trainer(data_collator=DataCollatorWithFlattening(), **given)
        else:
            trainer = LongContextTrainer(longctx_config=our_settings(job, name, tokens_per_rank), **given)
        setup = None if name == FLATTENING else trainer.longctx_run.setup
        trainer.log = lambda logs, start_time=None: trainer.state.log_history.append(dict(logs))
        trainer.train()
        plans = [] if name == FLATTENING or dist.get_rank() else read_journal(Path(folder)).of("step")[1:]
    seconds = [stop_s - start_s for start_s, stop_s in itertools.pairwise(ends.times_s)]
    losses = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    predicted_s = [0.0 if setup is None else planned_s(setup, lengths) for lengths in job.lengths]
    return Measurement(name, tokens_per_rank, 0, seconds, losses[1:], predicted_s, [line["layout"] for line in plans])


def planned_s(setup: Setup, lengths: Sequence[int]) -> float:
    """Predicted seconds of a step of these documents, with sums of gradients and the gathers that plans count.

    Chunks take their measured seconds, in which there are no gathers and sums; those follow from the measured rates of links.
    """
    plan, costs = plan_step(0, lengths, setup.costs, setup.planner), setup.costs
    # measured costs count the collectives of shards, but no sums of whole gradients
    with_sums = costs if costs.counts_weights else replace(costs, coefficients=default_coefficients(costs.model, costs.cluster))
    weights = weight_seconds(plan, with_sums)
    gathers_s = Planning(with_sums, setup.planner).gathers_s(plan)
    return evaluate_plan(plan, costs, with_events=False).step_s + gathers_s + weights.sum_s - weights.hidden_s


def our_settings(job: Job, name: str, tokens_per_rank: int) -> LongContextConfig:
    """Settings of our trainer: everything is kept, and costs are those that were measured before."""
    _, _, degree = name.partition(" <")
    own: dict[str, Any] = {"solver": "static", "static_degree": int(degree.rstrip(">"))} if degree else {}
    if name in (*ONE_STAGE, AUTO, *STAGED):
        stages: Any = 1 if name in ONE_STAGE else {AUTO: "auto"}.get(name, 2)
        own = {"parameters": name.partition(", ")[2] or "sharded", "stages": stages, "hardware": str(job.profile)}
    settings: dict[str, Any] = {"hardware": str(job.profile), **own}
    return LongContextConfig(
        tokens_per_rank=tokens_per_rank,
        max_length=max(map(max, job.lengths)),
        activations="keep",
        calibration_steps=0,
        self_test=False,
        report_steps=False,
        timeline_steps=0,
        collective_timeout_s=_TIMEOUT_S,
        **settings,
    )


@contextmanager
def shared_folder() -> Iterator[str]:
    """Makes a temporary folder that all ranks use, and removes it when all have left. Collective."""
    box = [tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None]
    name = [box[0].name if box[0] else ""]
    dist.broadcast_object_list(name, src=0)
    yield name[0]
    dist.barrier()
    if box[0]:
        box[0].cleanup()


def load_deepspeed() -> None:
    """Imports DeepSpeed and joins it to the process group, without operators that need a compiler."""
    import deepspeed

    # without a compiler, use gloo in place of DeepSpeed's own collectives in shared memory
    deepspeed.ops.__compatible_ops__.clear()
    deepspeed.init_distributed("gloo", verbose=False)


def with_deepspeed(job: Job, name: str, degree: int) -> Measurement:
    """Trains with DeepSpeed's attention on groups of `degree` ranks."""
    rank, num_groups = dist.get_rank(), dist.get_world_size() // degree
    groups = [dist.new_group(range(first, first + degree)) for first in range(0, dist.get_world_size(), degree)]
    own, model = rank // degree, build_model(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    times_s, losses = [], []
    with ulysses_attention(model, groups[own]):
        for place, rows in enumerate(documents(job)):
            share = len(rows) // num_groups
            count = sum(len(row) - 1 for row in rows)
            total = torch.zeros(())
            for row in rows[own * share : (own + 1) * share]:
                loss = document_loss(model, row, rank % degree, degree) / count
                loss.backward()
                total += loss.detach()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            flat = torch._utils._flatten_dense_tensors(gradients)
            dist.all_reduce(flat)
            dist.all_reduce(total)
            for gradient, summed in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(summed)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            # the first step warms up, with a learning rate of 0 as in the trainers
            optimizer.param_groups[0]["lr"] = _LEARNING_RATE if place else 0.0
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(total))
            if not place:
                limit_cores(Path(job.folder), True)
            times_s.append(time.perf_counter())
    for group in groups:
        dist.destroy_process_group(group)
    seconds = [stop_s - start_s for start_s, stop_s in itertools.pairwise(times_s)]
    predicted_s = [documents_s(job, model, lengths, degree) for lengths in job.lengths]
    return Measurement(name, 0, 0, seconds, losses[1:], predicted_s, [f"<{degree}x{num_groups}>"] * len(seconds))


@contextmanager
def ulysses_attention(model: PreTrainedModel, group: dist.ProcessGroup) -> Iterator[None]:
    """Makes DeepSpeed's attention the model's, as `register_with_transformers` does, and gives back what was there."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config, plain = model.config, ALL_ATTENTION_FUNCTIONS["sdpa"]
    attention = UlyssesSPAttentionHF(
        attn=plain,
        batch_size=1,
        attn_head_count=config.num_attention_heads,
        attn_head_size=config.hidden_size // config.num_attention_heads,
        kv_head_count=config.num_key_value_heads,
        num_hidden_layers=config.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
    )

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        # the mask is that of this rank's tokens alone
        return attention(module, query, key, value, None, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain


def document_loss(model: PreTrainedModel, row: list[int], place: int, degree: int) -> torch.Tensor:
    """Summed loss of this rank's part of a document, which is filled up to a multiple of the group's ranks."""
    filled = -(-len(row) // degree) * degree
    ids = torch.tensor([*row, *[0] * (filled - len(row))])
    labels = torch.tensor([*row[1:], *[-100] * (filled - len(row) + 1)])
    part = slice(place * filled // degree, (place + 1) * filled // degree)
    logits = model(input_ids=ids[None, part], position_ids=torch.arange(filled)[None, part], use_cache=False).logits[0]
    return F.cross_entropy(logits, labels[part], ignore_index=-100, reduction="sum")


def documents_s(job: Job, model: PreTrainedModel, lengths: list[int], degree: int) -> float:
    """Predicted seconds of a step with one document at a time on every group, by the costs of our own Ulysses groups."""
    world, launch = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    profile = read_profile(job.profile)
    cluster = replace(cluster_spec(torch.device("cpu"), world, launch), hardware=profile.spec)
    costs = CostModel(model_spec(model, False), cluster, profile.models[0].coefficients)
    share = len(lengths) * degree // world
    layout = [[(degree, (group * share + place,)) for group in range(world // degree)] for place in range(share)]
    placed = place_layout(layout, world, launch, node_aligned=True)
    plan = build_plan(0, lengths, placed, {degree: GroupShape(degree, degree)}, costs)
    return evaluate_plan(plan, costs, with_events=False).step_s
