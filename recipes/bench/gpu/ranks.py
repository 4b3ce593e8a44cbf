"""Compares 2 and 4 ranks on one GPU with a single process, for every way to divide a training; takes about four minutes.

    python recipes/bench/gpu/ranks.py [--ranks 2 4] [--only WORD ...] [--budget-s 230] [--json FILE] [--toy]

Each row trains for two steps of plain gradient descent, through `LongContextTrainer`, in a layout of its own: Ulysses, a ring,
both, groups that the plan chooses, sharded weights, pipeline stages, slices, offload, states and layers on the host, adapters,
also over frozen weights in fp8, spread experts, a model with linear attention, a resume in another layout, and a rank that is
killed. Compared are the losses of both steps and what the steps added to each weight, read from the checkpoint that the ranks
save: the largest relative error of any weight. One process trains the same rows first.

NCCL lets ranks share a device from version 2.30 on (`NCCL_MULTI_RANK_GPU_ENABLE`). Older ones take each rank for a machine of its
own (`NCCL_HOSTID`), and ranks talk through sockets. No seconds are printed: ranks that share a device say nothing about speed.
Without CUDA all is skipped, unless `--toy` runs a small model on the CPU with gloo. Exits with status 1 if a row fails or the
time is up before all have run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any

import datasets
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.core_model_loading import revert_weight_conversion

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.hf.models.quantised import round_frozen
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.setup import COMMUNICATOR_BYTES, num_communicators
from hf_longctx.recipes.bench.gpu.rows import append_row, end_with_children, is_wanted

# documents of a step, in tokens; on the CPU a 32nd
LENGTHS = (4096, 1536, 1024, 512, 2048, 256, 768, 1024)
NUM_STEPS, RATE = 2, 0.1
# errors allowed of losses and of changes of weights: bf16 under autocast, as weights in fp8 need on the CPU, too; fp32 on the CPU
TOLERANCES = {"cuda": (2e-2, 1e-1), "cpu": (1e-4, 5e-3)}
VICTIM = 1
KILLED = "a rank that is killed"
ROW = "ROW "


@dataclass(frozen=True)
class Case:
    """One layout. resumed: settings of the run that goes on from its first step, None for a run that does not stop.

    room_tokens: tokens whose activations fit on a device, 0 for all. num_nodes: nodes on which the ranks believe they are.
    """

    config: Mapping[str, Any]
    model: str = "dense"
    resumed: Mapping[str, Any] | None = None
    room_tokens: int = 0
    num_nodes: int = 1


@dataclass(frozen=True)
class Row:
    """One line of the table. error: the largest of a loss or a weight, as a multiple of what is allowed."""

    name: str
    num_ranks: int
    loss_error: float = 0.0
    weight_error: float = 0.0
    is_good: bool = False
    note: str = ""

    def __str__(self) -> str:
        state = "ok" if self.is_good else "FAILED"
        return f"{self.num_ranks} ranks  {self.name:36s} {state:7s}{self.loss_error:9.1e} {self.weight_error:9.1e}  {self.note}"


def cases(num_ranks: int, longest: int) -> dict[str, Case]:
    """All layouts of so many ranks, by name. longest: tokens of the longest document."""
    together = {"solver": "static", "static_degree": num_ranks}
    found = {
        "Ulysses": Case({**together, "method": "ulysses"}),
        "ring": Case({**together, "method": "ring"}),
        "groups that the plan chooses": Case({"tokens_per_rank": longest // 2}),
        "sharded weights": Case({"parameters": "sharded"}),
        "sharded weights, kept for the step": Case({"parameters": "gathered_per_step"}),
        "stages": Case({"stages": 2}),
        "stages, slices": Case({"stages": 2, "tokens_per_rank": longest // num_ranks}),
        "activations in tiles and on the host": Case(
            {**together, "host_gib": 1.0, "tile_tokens": longest // num_ranks // 8}, room_tokens=longest // num_ranks * 3 // 4
        ),
        "optimizer states on the host": Case({"parameters": "sharded", "optimizer_states": "host"}),
        "layers on the host": Case({"parameters": "sharded", "layer_weights": "host"}),
        "adapters": Case({**together, "parameters": "sharded"}, "adapters"),
        "adapters over fp8": Case({**together, "parameters": "sharded"}, "fp8"),
        "adapters over fp8, stages": Case({"stages": 2}, "fp8"),
        "adapters over fp8, activations on the host": Case(
            {**together, "host_gib": 1.0, "tile_tokens": longest // num_ranks // 8},
            "fp8",
            room_tokens=longest // num_ranks * 3 // 4,
        ),
        "spread experts": Case({"parameters": "sharded", "expert_ranks": num_ranks}, "experts"),
        "states of linear attention": Case({**together, "method": "ulysses"}, "states"),
        "shards, resumed as stages": Case({"parameters": "sharded"}, resumed={"stages": 2}),
        KILLED: Case({"parameters": "sharded"}),
    }
    if num_ranks >= 4:
        found["Ulysses inside a ring"] = Case({**together, "method": "hybrid"})
        found["sharded weights, copies on two nodes"] = Case({"parameters": "gathered_per_node"}, num_nodes=2)
        found["stages of sharded weights"] = Case({"stages": 2, "parameters": "sharded"})
        found["stages, weights kept for the step"] = Case({"stages": 2, "parameters": "gathered_per_step"})
    return {name: found[name] for name in sorted(found, key=lambda name: name == KILLED)}


@dataclass(frozen=True)
class Job:
    """Task of one process. folder: has the references, and is removed at the end."""

    folder: Path
    num_ranks: int
    names: tuple[str, ...]
    device: str
    is_toy: bool
    lengths: tuple[int, ...] = field(default=LENGTHS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    options = parse(arguments)
    if options.job:
        known = json.loads(options.job)
        train_all(Job(**{**known, "folder": Path(known["folder"]), "names": tuple(known["names"])}))
        return 0
    if not (options.toy or torch.cuda.is_available()):
        print("skipped: torch sees no CUDA device, and all ranks share one")
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU, toy sizes'}, torch {torch.__version__}, {backend(device)}"
    )
    print(f"{'layout':45s} {'':7s}{'losses':>9s} {'weights':>9s}", flush=True)
    lengths = tuple(length // 32 for length in LENGTHS) if options.toy else LENGTHS
    wanted = {n: [name for name in cases(n, lengths[0]) if is_wanted(name, options.only)] for n in options.ranks}
    deadline_s, rows = time.monotonic() + options.budget_s, []
    with tempfile.TemporaryDirectory() as folder:
        models = sorted({cases(n, lengths[0])[name].model for n, names in wanted.items() for name in names if name != KILLED})
        if models:
            ended = list(rows_of(Job(Path(folder), 1, tuple(models), device, options.toy, lengths), deadline_s))
            failed = [model for model in models if not (Path(folder) / f"{model}.pt").exists()]
            if ended and failed:
                print(
                    f"the reference in one process failed for the model {failed[0]!r}, so nothing is compared: {ended[-1].note}"
                )
                return 1
        for num_ranks, names in wanted.items():
            left = list(names)
            while left and time.monotonic() < deadline_s:
                job = Job(Path(folder), num_ranks, tuple(left), device, options.toy, lengths)
                for row in rows_of(job, deadline_s):
                    print(row, flush=True)
                    rows.append(row)
                    left.remove(row.name)
                    if options.json is not None:
                        append_row(options.json, asdict(row))
    total, good = sum(map(len, wanted.values())), sum(row.is_good for row in rows)
    missing = f", {total - len(rows)} were not run: the time is up" if len(rows) < total else ""
    print(f"{good} of {total} rows are ok{missing}")
    return 0 if good == total else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks that share the device")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows whose names have one of these words")
    parser.add_argument("--budget-s", type=float, default=230.0, help="end after so many seconds (default: 230)")
    parser.add_argument("--json", type=Path, default=None, help="also append each row to this file, as soon as it is done")
    parser.add_argument("--toy", action="store_true", help="a small model, also without CUDA")
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def backend(device: str) -> str:
    """Names what carries messages between ranks."""
    if device == "cpu":
        return "gloo"
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def rows_of(job: Job, deadline_s: float) -> Iterator[Row]:
    """Starts the ranks of a job and yields its rows as they come; ranks that end early get a row that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start_rank(job, rank, port) for rank in range(job.num_ranks)]
    # None: rank 0 has ended
    lines: Queue[str | None] = Queue()
    Thread(target=_read, args=(ranks[0].stdout, lines), daemon=True).start()
    names, told = list(job.names), list[str]()
    try:
        while names:
            line = lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            if line is None:
                yield end_row(job, names[0], "".join(told))
                return
            if not line.startswith(ROW):
                told.append(line)
                continue
            row = Row(**json.loads(line.removeprefix(ROW)))
            if row.name == KILLED:
                row = replace(row, is_good=False, note="no rank was lost")
            names.remove(row.name)
            yield row
    except Empty:
        # the time is up
        return
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def _read(out: IO[str], lines: Queue[str | None]) -> None:
    for line in out:
        lines.put(line)
    lines.put(None)


def end_row(job: Job, name: str, told: str) -> Row:
    """The row during which rank 0 ended. It is good if that should end, with words about the lost rank."""
    if name == KILLED:
        named = [line for line in told.splitlines() if f"rank {VICTIM}" in line.lower()]
        return Row(name, job.num_ranks, is_good=bool(named), note=named[-1].strip()[:90] if named else "rank 0 does not name it")
    return Row(name, job.num_ranks, note=(told.strip().splitlines() or ["rank 0 ended without a word"])[-1][:120])


def start_rank(job: Job, rank: int, port: int) -> subprocess.Popen[str]:
    """Starts one rank of a job; rank 0 says what it finds, and errors. port: where ranks meet."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.num_ranks),
        "LOCAL_WORLD_SIZE": str(job.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **shared_device(job, rank),
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--job", json.dumps({**asdict(job), "folder": str(job.folder)})]
    out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
    err = subprocess.STDOUT if rank == 0 else subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=out, stderr=err, text=True)


def shared_device(job: Job, rank: int) -> dict[str, str]:
    """Settings with which NCCL lets all ranks use the first device."""
    if job.device == "cpu":
        return {}
    found = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    if job.num_ranks == 1:
        return found
    if torch.cuda.nccl.version() >= (2, 30):
        # more than two ranks of a device must take few of its multiprocessors
        return {**found, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
    return {**found, "NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def train_all(job: Job) -> None:
    """Runs all cases of a job on this rank; in one process, the reference of every model. Ends at the first that fails."""
    if job.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.9 / job.num_ranks)
    for name in job.names:
        if job.num_ranks == 1:
            torch.save(train(job, Case({}, model=name), "reference"), job.folder / f"{name}.pt")
            continue
        case = cases(job.num_ranks, job.lengths[0])[name]
        found = train(job, case, name)
        if int(os.environ["RANK"]) == 0:
            print("\n" + ROW + json.dumps(asdict(compared(job, name, case, found))), flush=True)


def compared(job: Job, name: str, case: Case, found: tuple[list[float], dict[str, Tensor], str]) -> Row:
    """Compares the losses of a case, and what its steps added to each weight, with those of one process."""
    expected_losses, expected, _ = torch.load(job.folder / f"{case.model}.pt")
    losses, changes, note = found
    if expected.keys() != changes.keys() or len(losses) != len(expected_losses):
        return Row(
            name, job.num_ranks, note=f"{len(changes)} weights and {len(losses)} losses for {len(expected)} and {NUM_STEPS}"
        )
    loss_errors = [abs(a / b - 1) for a, b in zip(losses, expected_losses, strict=True)]
    loss_error = max(loss_errors, key=_size)
    errors = {key: float((changes[key] - each).norm() / each.norm()) for key, each in expected.items() if each.norm() > 0}
    unmoved = [key for key, each in expected.items() if each.norm() == 0 and changes[key].norm() != 0]
    worst = max(errors, key=lambda key: _size(errors[key]))
    most_loss, most_weight = TOLERANCES["cuda" if case.model == "fp8" else job.device]
    is_good = loss_error <= most_loss and errors[worst] <= most_weight and not unmoved
    return Row(name, job.num_ranks, loss_error, errors[worst], is_good, note if is_good else f"{note}; worst: {worst}")


def _size(error: float) -> tuple[bool, float]:
    """Order of errors, in which NaN is the largest."""
    return math.isnan(error), error


class Watcher(TrainerCallback):
    """Records losses, and kills this process after the first step if it is told to."""

    def __init__(self, is_victim: bool) -> None:
        self.is_victim, self.losses = is_victim, [0.0] * 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            self.losses.append(logs["loss"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_victim:
            os.kill(os.getpid(), signal.SIGKILL)


def train(job: Job, case: Case, name: str) -> tuple[list[float], dict[str, Tensor], str]:
    """Trains on this rank; returns losses, what was added to every saved weight (on rank 0), and what the plans did."""
    folder = job.folder / f"{job.num_ranks} {name}"
    os.environ["LOCAL_WORLD_SIZE"] = str(job.num_ranks // case.num_nodes)
    model = build(job, case.model)
    before = {key: value.clone() for key, value in trained(model).items()}
    trainer, watcher, plans = trainer_of(job, case.config, model, folder, case, name == KILLED)
    if case.resumed is not None:
        trainer.args.save_strategy, trainer.args.save_steps, trainer.args.max_steps = "steps", 1, 1
        trainer.train()
        first = watcher.losses
        trainer.longctx_run.close()
        trainer, watcher, plans = trainer_of(job, case.resumed, build(job, case.model), folder, case)
        trainer.train(resume_from_checkpoint=True)
        losses = [*first, *watcher.losses]
    else:
        trainer.train()
        losses = watcher.losses
    trainer.save_model(str(folder / "last"))
    note = described(plans)
    if case.room_tokens and "not kept whole" not in note:
        raise RuntimeError(f"nothing was recomputed or offloaded: {note}")
    trainer.longctx_run.close()
    if int(os.environ["RANK"]):
        return losses, {}, note
    after = {key: value for file in sorted((folder / "last").glob("*.safetensors")) for key, value in load_file(file).items()}
    return losses, {key: after[key].float() - each.float() for key, each in before.items() if key in after}, note


def trained(model: PreTrainedModel | PeftModel) -> dict[str, Tensor]:
    """The weights that training changes, on the CPU, by the names that they have in a checkpoint."""
    if isinstance(model, PeftModel):
        return {name: weight.cpu() for name, weight in get_peft_model_state_dict(model).items()}
    return revert_weight_conversion(model, {name: weight.detach().cpu() for name, weight in model.named_parameters()})


def trainer_of(
    job: Job, config: Mapping[str, Any], model: PreTrainedModel, folder: Path, case: Case, is_killed: bool = False
) -> tuple[Any, Watcher, list[StepPlan]]:
    """A trainer of this rank, what watches it, and a list that gets its plans."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 512, (length,), generator=generator).tolist() for length in job.lengths] * NUM_STEPS
    is_fp8 = case.model == "fp8"
    is_autocast = job.device == "cuda" or is_fp8
    arguments = TrainingArguments(
        str(folder),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=len(job.lengths) // job.num_ranks,
        learning_rate=RATE,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        bf16=is_autocast,
        use_cpu=job.device == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # rows compare what a self-test compares
    settings = {"report_steps": False, "timeline_steps": 0, "self_test": False, "collective_timeout_s": 60.0, **config}
    if is_fp8:
        # rounded here to count its bytes; the trainer would do so otherwise
        round_frozen(model)
        settings["frozen_weights"] = "fp8"
    if case.room_tokens:
        bytes_of = ByteModel(model_spec(model, is_autocast=is_autocast))
        groups = num_communicators(job.num_ranks, (job.num_ranks,)) if job.device == "cuda" else 0
        room = bytes_of.states() + bytes_of.kept_bytes(case.room_tokens) + groups * COMMUNICATOR_BYTES
        settings["device_gib"] = room / 2**30
    watcher = Watcher(is_killed and int(os.environ["RANK"]) == VICTIM)
    trainer = LongContextTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
        longctx_config=LongContextConfig(**settings),
        callbacks=[watcher],
    )
    plans: list[StepPlan] = []
    done = trainer.longctx_run.report.step_done
    trainer.longctx_run.report.step_done = lambda plan, result: (plans.append(plan), done(plan, result))
    return trainer, watcher, plans


def described(plans: Sequence[StepPlan]) -> str:
    """Says what the first plan did."""
    plan = plans[0]
    groups = [group for each in plan.micro_batches for group in each.groups]
    spans = [span for group in groups for chunk in group.chunks for span in chunk.spans]
    stages = [stage for group in groups for stage in group.stages]
    policies = [policy for stage in stages for policy in stage.activations]
    touched = sum(bool(policy.layers) for policy in policies)
    sliced = len(spans) - len(plan.lengths)
    parts = [plan.folded_layout, f"{plan.num_stages} stages" if plan.num_stages > 1 else "", plan.parameters]
    parts += [
        f"{sliced} cuts" if sliced else "",
        f"{touched / max(1, len(policies)):.0%} of chunks not kept whole" if touched else "",
    ]
    return ", ".join(filter(None, parts))


def build(job: Job, name: str) -> PreTrainedModel:
    """The model of a case: two layers, as wide as a model of 2B parameters, or small."""
    torch.manual_seed(0)
    heads, width = (4, 64) if job.is_toy else (16, 2048)
    sizes = {
        "vocab_size": 512,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": width // heads,
        "max_position_embeddings": job.lengths[0],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if name == "experts":
        config: Any = transformers.Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=width // 2)
        return transformers.Qwen3MoeForCausalLM(config)
    if name == "states":
        linear = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        layers = ["linear_attention", "full_attention"]
        mlp = {"num_experts": 0, "mlp_only_layers": [0, 1]}
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes, **linear, **mlp, layer_types=layers))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if name in ("adapters", "fp8"):
        # matrices B that are zero would let no gradient through to A
        adapters = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(model, adapters)
    return model


if __name__ == "__main__":
    end_with_children()
    sys.exit(main())
