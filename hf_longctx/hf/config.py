"""`LongContextConfig`: every setting of a user, and the only place besides `cli` that reads the environment.

Kinds of settings: what type and range a field of `LongContextConfig` has, and the error that names a value outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

from hf_longctx.plan.core.messages import shown
from hf_longctx.plan.core.settings import GROUP_METHODS, SOLVERS
from hf_longctx.plan.core.sharding import MOST_HEAD_PARTS
from hf_longctx.plan.core.types import PARAMETERS

# more tokens, ranks or steps than any run has; beyond it, arithmetic in 64 bits would overflow somewhere
_MOST = 2**40
# a thousand years of seconds, an exabyte of GiB
_MOST_NUMBER = 1e10


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `least` to `most`. remedy: what to do about one that is too small."""

    least: int
    remedy: str
    is_optional: bool = False
    most: int = _MOST

    def checked(self, name: str, value: object) -> int | None:
        """The value as an int; raises ValueError naming the setting."""
        if value is None and self.is_optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name} is {shown(value)} ({type(value).__name__}); give a whole number{_or_nothing(self)}")
        number = int(value)
        if number < self.least:
            raise ValueError(f"{name} is {shown(number)}; {self.remedy}")
        if number > self.most:
            raise ValueError(f"{name} is {shown(number)}; give at most {self.most}")
        return number


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number above zero, or from zero on. remedy: what to do about one that is too small."""

    remedy: str
    may_be_zero: bool = False
    is_optional: bool = False
    most: float = _MOST_NUMBER

    def checked(self, name: str, value: object) -> float | None:
        """The value as a float; raises ValueError naming the setting."""
        if value is None and self.is_optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{name} is {shown(value)} ({type(value).__name__}); give a number{_or_nothing(self)}")
        try:
            number = float(value)
        except OverflowError:
            raise ValueError(f"{name} is {shown(value)}; give at most {self.most:g}") from None
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}; give a finite number{_or_nothing(self)}")
        if number < 0 or (number == 0 and not self.may_be_zero):
            raise ValueError(f"{name} is {number}; {self.remedy}")
        if number > self.most:
            raise ValueError(f"{name} is {number}; give at most {self.most:g}")
        return number


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words."""

    choices: Sequence[str]

    def checked(self, name: str, value: object) -> str:
        """The value; raises ValueError naming the setting and the choices."""
        if not isinstance(value, str) or value not in self.choices:
            raise ValueError(f"{name} is {shown(value)}; choose one of {', '.join(self.choices)}")
        return str(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """True or False, and nothing that merely counts as one of them."""

    is_optional: bool = False

    def checked(self, name: str, value: object) -> bool | None:
        """The value; raises ValueError naming the setting."""
        if value is None and self.is_optional:
            return None
        if not isinstance(value, bool):
            more = ", or leave it out" if self.is_optional else ""
            raise ValueError(f"{name} is {shown(value)} ({type(value).__name__}); give True or False{more}")
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """A name or a path; empty where there is none."""

    def checked(self, name: str, value: object) -> str:
        """The value; raises ValueError naming the setting."""
        if not isinstance(value, str):
            raise ValueError(f"{name} is {shown(value)} ({type(value).__name__}); give a name or a path as text")
        return value


@dataclass(frozen=True, slots=True)
class Sizes:
    """Group sizes, or "all": numbers, or the words of a command line."""

    def checked(self, name: str, value: Any) -> Any:
        """Returns None, "all" or a list of ints; raises ValueError naming the setting."""
        words = [value] if isinstance(value, str) else value
        if words is None:
            return None
        found = value if isinstance(value, str) and len(value) < 80 and value.isprintable() else shown(value)
        refused = f"{name} is {found}; give positive group sizes, for example [1, 2, 4], or 'all' alone"
        if not isinstance(words, list | tuple) or len(words) > _MOST_SIZES:
            raise ValueError(refused)
        if list(words) == ["all"]:
            return "all"
        sizes = [_size(word) for word in words]
        if not sizes or any(size is None or not 1 <= size <= _MOST_SIZE for size in sizes):
            raise ValueError(refused)
        return sizes


@dataclass(frozen=True, slots=True)
class NumStages:
    """A number of pipeline stages, "auto", or None: also the words of a command line."""

    def checked(self, name: str, value: Any) -> Any:
        """The word "auto", an int or None; raises ValueError naming the setting."""
        if value is None:
            return None
        number = value if isinstance(value, str) and value == "auto" else _size(value)
        if number == "auto" or (isinstance(number, int) and 1 <= number <= _MOST_SIZE):
            return number
        raise ValueError(f"{name} is {shown(value)}; give a number of pipeline stages, 1 for none, or 'auto'")


# ranks of the largest group or pipeline, and sizes in a list of them
_MOST_SIZE, _MOST_SIZES = 2**20, 2**12

Kind = Whole | Number | Word | Flag | Text | Sizes | NumStages


def _size(word: object) -> int | None:
    """A number that is whole, also one written as a word; None for anything else."""
    if isinstance(word, str):
        return int(word) if word.isascii() and word.isdecimal() and len(word) < 20 else None
    return int(word) if isinstance(word, Integral) and not isinstance(word, bool) else None


def _or_nothing(kind: Whole | Number) -> str:
    return ", or leave it out" if kind.is_optional else ""


LONG_SEQUENCES = ("error", "truncate", "split")

if TYPE_CHECKING:
    Degrees = list[int] | Literal["all"]
    Stages = int | Literal["auto"]
else:
    # the words of a command line: `HfArgumentParser` takes one type per setting
    Degrees = list[str]
    Stages = str


@dataclass
class LongContextConfig:
    """Settings by which sequences are cut, spread and reported. Ready for `HfArgumentParser`; the common fields come first.

    Example:

        config = LongContextConfig(max_length=32768, long_sequences="split", tokens_per_rank=8192)
        trainer = LongContextTrainer(model=model, args=args, train_dataset=dataset, longctx_config=config)
        trainer.train()
    """

    max_length: int | None = field(
        default=None,
        metadata={"help": "Longest sequence in tokens. Default: the model's max_position_embeddings."},
    )
    long_sequences: Literal["error", "truncate", "split"] = field(
        default="error",
        metadata={
            "help": "What to do with a sequence above `max_length` or too long for memory: `error` stops before training and "
            "names the row and its length, `truncate` drops its tail, `split` cuts it into independent documents."
        },
    )
    tokens_per_rank: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens that one rank holds at once; a group of d ranks takes d times as many. Default: computed "
            "from the device's memory, and more for a sequence that is alone, if slices hold it."
        },
    )
    activations: Literal["auto", "keep"] = field(
        default="auto",
        metadata={
            "help": "What to do with chunks whose activations do not fit. `auto`: linear programs choose for every layer "
            "what to keep, offload or recompute, so that it takes the least time. `keep`: never recompute or offload."
        },
    )
    device_gib: float | None = field(
        default=None,
        metadata={
            "help": "GiB of a device that a rank may use, including the model and communicators of NCCL (half a GiB for each "
            "process group). Default: four fifths of the device, or 92 % if torch's allocator has expandable segments."
        },
    )
    host_gib: float | None = field(
        default=None,
        metadata={
            "help": "Most GiB of host memory for a rank's offloaded activations. A run that offloads nothing takes none of "
            "it. On CUDA, what the longest rows of the training set need is pinned before the first step, in some tenths of "
            "a second per GiB, and more between steps if a plan needs more. 0: never offload. Default: on CUDA half of the "
            "machine's memory, shared by its ranks, and at most 64 for each; on CPU 0."
        },
    )
    tile_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens per tile of the MLP and the norms in chunks that do not keep everything; output head and loss run in "
            "tiles of at most 2,048, so that logits never exist as a whole. 0: no tiles. Default: 8,192, 4,096 or 2,048, the "
            "most of which a tile takes little of the memory. Where a sequence fits only if layers keep nothing but their "
            "inputs, tiles have at most 2,048."
        },
    )
    tokens_per_step: int | None = field(
        default=None,
        metadata={"help": "Average number of tokens in an optimizer step, instead of a number of sequences. Default: none."},
    )
    lookahead_batches: int | None = field(
        default=None,
        metadata={
            "help": "For an iterable `train_dataset` only: how many global batches may be read ahead of the running step. "
            "Default: 4."
        },
    )
    stream_readers: int = field(
        default=1,
        metadata={
            "help": "Number of readers of an iterable `train_dataset`. Each reads and tokenises its own shard ahead, in a "
            "thread of one rank (they are spread over ranks), and sends tokens straight to the ranks that hold them. Readers "
            "take turns, sequence by sequence. A run resumes on any number of ranks with the same number of readers "
            "(docs/guides/data.md). Needs a dataset that can be divided: with a method `shard`, or a `ShardedStream`."
        },
    )
    degrees: Degrees | None = field(
        default=None,
        metadata={
            "help": "Allowed sizes of sequence groups. Any sizes; with method `ulysses` powers of two or all ranks, and no "
            "more than attention heads. `all`: every size up to 8, multiples of 8 up to 64, and the default ones. Default: "
            "powers of two and all ranks."
        },
    )
    method: Literal["auto", "ulysses", "ring", "hybrid"] = field(
        default="auto",
        metadata={
            "help": "How a group of two or more ranks shares attention: `ulysses` (all-to-all between tokens and heads), "
            "`ring` (keys and values pass from rank to rank; any degree), `hybrid` (Ulysses inside blocks of as many ranks "
            "as KV heads and node allow, a ring across blocks), or `auto`: for every degree the method that is fastest on "
            "this run's links. Inside pipeline stages `auto` is `ulysses` wherever heads and degrees allow that, since a ring "
            "sends earlier slices again with every slice."
        },
    )
    stages: Stages | None = field(
        default=None,
        metadata={
            "help": "Number of pipeline stages: ranks are divided into this many stages, each of which holds a range of the "
            "layers, and long sequences pass them in slices. 1: no pipeline; `auto`: the number that is predicted to be "
            "fastest on a sample of the training set. Default: `auto` if ranks are on several nodes and nothing speaks against "
            "it (docs/guides/pipelines.md), else 1; a line says which."
        },
    )
    exchange_parts: int = field(
        default=MOST_HEAD_PARTS,
        metadata={
            "help": "Most parts in which the ranks of a group exchange attention heads (Ulysses) while attention of other parts "
            "runs, if a chunk is long enough for that and the heads can be divided. 1: all heads before and after attention."
        },
    )
    interleave: int = field(
        default=1,
        metadata={
            "help": "Number of layer ranges per pipeline stage. With 2 or more, stages alternate along the layers, which "
            "shortens idle times at the ends of a step but needs more messages. Used if a sample of the training set is "
            "predicted to be faster with it, and always by `load_pipeline_stage`. 1: one range per stage. Needs stages; not "
            "with `gathered_per_round` parameters."
        },
    )
    lend_stages: bool = field(
        default=False,
        metadata={
            "help": "Stages that would be idle while a long sequence enters and leaves the pipeline run some of its slices "
            "for other stages, in plans where that is predicted to be faster. Every rank then holds the weights of all "
            "stages. Needs stages, adapters (LoRA) and replicated parameters."
        },
    )
    spread_head: bool = field(
        default=True,
        metadata={
            "help": "Stages may share the work of the output head, if the busiest stage is predicted to work less then: the last "
            "stage sends hidden states of some chunks to other stages, which run head and loss for it, and hold and train the "
            "head's weight too. The last stage runs all heads if stages lend ranks or have several layer ranges, beside a "
            "teacher, and for classifiers, models with images, and heads that are not plain matrices."
        },
    )
    compile_layers: bool | None = field(
        default=None,
        metadata={
            # `--compile_layers` alone says yes
            "nargs": "?",
            "const": True,
            "help": "`torch.compile` makes one kernel each of RMSNorm, RMSNorm with a gate, the gated activation of MLPs and the "
            "rotary embedding, in the classes that compute these as Llama, Gemma or Qwen3-Next do (a line at start counts "
            "them); other modules, hooked MLPs and mixed dtypes run their own code. Needs a C++ compiler on CPU and Triton on "
            "a GPU: without, a warning says so and layers run their own code. Kernels are compared with the model's own code "
            "at start, which takes some seconds; docs/performance.md says what they gain. Not for the callback without attach. "
            "Default: on CUDA, unless Liger makes them.",
        },
    )
    frozen_weights: Literal["unchanged", "fp8"] = field(
        default="unchanged",
        metadata={
            "help": "`fp8`: the frozen matrices of attention and MLPs below adapters (LoRA) are rounded once, at start, to eight "
            "bits with a scale for each row, and multiplied in fp8, forward and backward: half the bytes in memory and gathers, "
            "and faster products on GPUs of compute capability 8.9 or later. Gradients are those of the rounded model, several "
            "times less close than in bf16 (docs/guides/lora-and-qlora.md). `unchanged`: as they were loaded."
        },
    )
    parameters: Literal["replicated", "sharded", "gathered_per_round", "gathered_per_step", "gathered_per_node", "auto"] = field(
        default="replicated",
        metadata={
            "help": "How weights, gradients and optimizer states are distributed: `replicated` (whole on every rank), "
            "`sharded` (FSDP2: sharded over ranks, gathered layer by layer in every forward and backward), "
            "`gathered_per_round` (sharded too, but gathered once per micro-batch, which needs memory for all weights), "
            "`gathered_per_step` (gathered once per optimizer step, while every backward sums gradients into shards, as ZeRO-2 "
            "does), `gathered_per_node` (sharded over all ranks, but each node keeps a copy for a step, on its ranks, from which "
            "layers are gathered, and sums of gradients cross nodes once per step) or `auto` (the one that is predicted to be "
            "fastest for a step of the training set among those that hold its longest sequence; decided at start on all ranks, "
            "and printed)."
        },
    )
    shard_ranks: int | None = field(
        default=None,
        metadata={
            "help": "Number of ranks that share one copy of sharded parameters, for example those of a node (HSDP), with "
            "copies of the shards across nodes. Default: all ranks."
        },
    )
    expert_ranks: int | None = field(
        default=None,
        metadata={
            "help": "Number of ranks over which the experts of a mixture are spread: each holds its share of them whole, "
            "tokens travel to them, and their weights are never gathered (docs/experts.md). These ranks share one copy of "
            "the other sharded parameters too, so `shard_ranks` is the same number or left out. Needs "
            '`parameters="sharded"`. Default: none.'
        },
    )
    solver: Literal["auto", "greedy", "lp", "milp", "static"] = field(
        default="auto",
        metadata={
            "help": "`auto`: exact for few sequences, else greedy. `greedy`: the fast planner alone. `lp` and `milp`: "
            "linear or integer programs (HiGHS, else CBC) improve its plan for up to `solver_time_limit_s`, while the step "
            "before runs. `static`: one degree for all groups, as a baseline."
        },
    )
    solver_time_limit_s: float = field(
        default=10.0,
        metadata={
            "help": "Seconds that linear and integer programs may take for one step; a step is planned while the one before it "
            "runs."
        },
    )
    static_degree: int = field(
        default=0,
        metadata={"help": "The degree of `static`; 0 takes the best one for every step."},
    )
    micro_batch_trials: int = field(
        default=5,
        metadata={"help": "How many different numbers of micro-batches the planner tries."},
    )
    time_aware: bool = field(
        default=True,
        metadata={
            "help": "Divide sequences into micro-batches by time as well as by tokens, and move sequences between them to "
            "fill idle time. No effect on `static`, and in the callback without attach."
        },
    )
    nested: bool = field(
        default=True,
        metadata={
            "help": "A rank may change groups inside a step and then waits for its partners only (with `shard_ranks`: for "
            "its block). No effect if parameters are sharded over all ranks, and in the callback without attach."
        },
    )
    node_aligned: bool = field(
        default=True,
        metadata={"help": "Place every group that fits into a node inside one node. No effect on a single node."},
    )
    hardware: str = field(
        default="",
        metadata={
            "help": "Costs for the first plans: a file written by `hf-longctx calibrate --output FILE` (predictions then "
            "start with the first step, and no step is used to explore), or the name of a shipped profile "
            "(`recipes/hardware`), whose rates start the run until it has measured its own."
        },
    )
    calibration_steps: int = field(
        default=4,
        metadata={
            "help": "Warm-up steps from whose measured chunks the cost coefficients are fitted; they try one degree after "
            "the other. Later the coefficients are fitted again whenever the median error of the last predictions is above a "
            "tenth. 0: keep the coefficients of the start."
        },
    )
    resume_partial: bool = field(
        default=False,
        metadata={
            "help": "Resume from a checkpoint whose weights are there even if other parts (optimizer, schedule, random "
            "numbers, count of steps, data record) are missing or damaged; the log says what starts anew. Otherwise it is "
            "refused, and the files are named."
        },
    )
    async_save: bool = field(
        default=False,
        metadata={
            "help": "Write checkpoints behind training: at a save, training stands still until all files are in host memory "
            "(/dev/shm); a thread of each rank writes them to `output_dir`, one checkpoint at a time. An error of the thread "
            "is raised on all ranks at a later step (docs/guides/checkpoints.md). Not for the callback without attach, whose "
            "steps begin without an exchange."
        },
    )
    collective_timeout_s: float = field(
        default=60.0,
        metadata={
            "help": "Seconds within which a rank that died or hangs is named, and those that wait for it give up. A rank that "
            "works is waited for, at most `ddp_timeout` of the training arguments."
        },
    )
    fp32_gradients: bool = field(
        default=True,
        metadata={
            "help": "Sum the gradients of bf16 weights in fp32 buffers (4 bytes per parameter); no effect on fp32 weights."
        },
    )
    fp32_master_weights: bool = field(
        default=True,
        metadata={
            "help": "The optimizer updates an fp32 copy of every bf16 weight that is trained, and keeps its moments in fp32 "
            "(8 more bytes per parameter, counted in plans). At a learning rate of 1e-5 most updates of bf16 weights would "
            "be rounded away. No effect on fp32 weights, such as those of adapters."
        },
    )
    optimizer_states: Literal["device", "host", "auto"] = field(
        default="device",
        metadata={
            "help": "`host`: the optimizer's states, and fp32 copies of the weights, lie in host memory (16 bytes per trained "
            "parameter of a rank in bf16, 20 in fp32), and the CPU updates the weights, part by part, while others are "
            "copied. The device keeps weights and gradients alone, and steps get slower. `auto`: `device` if that leaves room"
            " for the longest training sequence (at most `max_length`; a stream counts as that long), else `host` if its "
            "memory holds the states and more tokens then fit. The choice is made at start from numbers agreed on all ranks, "
            "and printed with them (docs/guides/memory.md).",
        },
    )
    layer_weights: Literal["device", "host", "auto"] = field(
        default="device",
        metadata={
            "help": "`host`: while forwards and backwards run, the shards of layers lie in host memory (the bytes of a rank's "
            'shards, pinned; none beside `optimizer_states="host"`), and the device has those of two layers, copied one '
            "layer ahead of their gathers. Between steps all shards are on the device. `auto`: `host` if the longest training "
            "sequence does not fit otherwise and more tokens then do; a line says why. Needs "
            '`parameters="sharded"` (docs/guides/memory.md).'
        },
    )
    self_test: bool = field(
        default=True,
        metadata={
            "help": "At start, for some seconds: a copy of the model with one layer of every kind (all layers, for a class "
            "that cannot be cut into stages) runs small plans of every shape and is compared with plain `transformers` in "
            "fp64 (docs/self-test.md); if they differ, the run stops before step 1. Skipped, with a logged line, if each "
            "rank loads its own stage or memory has no room for the copy."
        },
    )
    on_nonfinite: Literal["stop", "skip"] = field(
        default="stop",
        metadata={
            "help": "A step whose loss or gradients are NaN or infinite, before any weight changes. `stop`: end the run on "
            "all ranks, name sequences and the first module concerned, and save the step. `skip`: leave it out; the log "
            "counts `skipped_steps` (a callback that is not attached to its trainer warns instead, and names no sequences)."
        },
    )
    replica_check_steps: int | None = field(
        default=None,
        metadata={
            "help": "Every how many steps ranks with copies of the same weights compare checksums of them; a rank that has "
            "drifted apart stops the run by its number, before anything is saved from it. 0: never. Default: before every "
            "checkpoint."
        },
    )
    token_metrics: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "help": "Log token accuracy and entropy of training steps as TRL does (`mean_token_accuracy`, `entropy`, "
            "`num_tokens`). `auto`: with TRL's `SFTTrainer`; `on`: with any trainer of a language model; `off`: never. They "
            "are means over the label tokens of a plan, counted in the tiles of its loss, whose logits are then read once "
            "more; `token_loss` does not change them."
        },
    )
    distillation_beta: float = field(
        default=0.0,
        metadata={
            "help": "With `LongContextTrainer(..., teacher=model)`, the distance of the model's distribution of the next token "
            "from the teacher's: 0 is the forward KL divergence, KL(teacher || model), 1 the reverse one, and numbers between "
            "are the generalised Jensen-Shannon divergence, as TRL's trainers define it (docs/guides/distillation.md)."
        },
    )
    distillation_temperature: float = field(
        default=1.0,
        metadata={"help": "Both distributions are those of logits / this number; the distance is not multiplied by its square."},
    )
    distillation_weight: float = field(
        default=1.0,
        metadata={"help": "Share of the distance in the loss, from 0 to 1; the rest is the cross-entropy of the labels."},
    )
    distillation_top_k: int | None = field(
        default=None,
        metadata={
            "help": "Compare the teacher's k likeliest tokens, and all others together as one more token. Default: all tokens."
        },
    )
    report_steps: bool = field(
        default=True,
        metadata={"help": "Print what the run will do and one line per log on rank 0, in place of the trainer's dictionaries."},
    )
    timeline_steps: int = field(
        default=3,
        metadata={
            "help": "Number of steps in `timeline.json` (Chrome trace), and in `timeline.png` with matplotlib; 0: write none."
        },
    )

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError naming the first setting with a wrong type, a value out of range, or no effect beside another.

        A run calls it again when it starts, since fields can be set after construction.
        """
        for name, kind in KINDS.items():
            setattr(self, name, kind.checked(name, getattr(self, name)))
        if self.host_gib and self.activations == "keep":
            raise ValueError(f"host_gib is {self.host_gib} but activations are 'keep', which offloads nothing; leave one out")
        if self.lend_stages and self.interleave > 1:
            raise ValueError(
                f"lend_stages is set and interleave is {self.interleave}; stages of several layer ranges lend no ranks, so leave "
                f"one of them out"
            )
        if self.shard_ranks is not None and self.parameters == "replicated":
            raise ValueError(
                f"shard_ranks is {self.shard_ranks} but parameters are 'replicated', and only sharded ones have copies; leave "
                f"shard_ranks out, or set parameters='sharded'"
            )
        if self.expert_ranks is not None:
            self._check_expert_ranks(self.expert_ranks)
        if self.static_degree and self.solver != "static":
            raise ValueError(
                f"static_degree is {self.static_degree} but solver is {self.solver!r}; it has an effect with solver 'static' only"
            )

    @property
    def asked_stages(self) -> int | Literal["auto"]:
        """The setting `stages`; 1 if it is left open."""
        return 1 if self.stages is None else self.stages

    @property
    def may_have_stages(self) -> bool:
        """Whether the run may have several pipeline stages."""
        return self.asked_stages != 1

    def _check_expert_ranks(self, expert_ranks: int) -> None:
        if self.parameters != "sharded":
            raise ValueError(
                f"expert_ranks is {expert_ranks} but parameters are {self.parameters!r}; tokens travel between ranks that run "
                f"the same layers at the same time, so set parameters='sharded', or leave expert_ranks out"
            )
        if self.shard_ranks not in (None, expert_ranks):
            raise ValueError(
                f"expert_ranks is {expert_ranks} but shard_ranks is {self.shard_ranks}; experts are spread over the ranks that "
                f"share one copy of the other parameters, so leave shard_ranks out or give both the same number"
            )


_TOKENS = Whole(1, "give a positive number of tokens or leave it out", is_optional=True)
_COUNT = Whole(0, "it cannot be negative", most=2**31)
_SECONDS = Number("give a positive number of seconds")

# type and range of every setting
KINDS: dict[str, Kind] = {
    "max_length": _TOKENS,
    "long_sequences": Word(LONG_SEQUENCES),
    "tokens_per_rank": _TOKENS,
    "activations": Word(("auto", "keep")),
    "device_gib": Number("give more than 0 or leave it out", is_optional=True),
    "host_gib": Number("it cannot be negative (0: nothing is offloaded)", may_be_zero=True, is_optional=True),
    "tile_tokens": Whole(0, "it cannot be negative (0: untiled)", is_optional=True),
    "tokens_per_step": _TOKENS,
    "lookahead_batches": Whole(1, "at least 1 global batch must be read ahead", is_optional=True, most=2**31),
    "stream_readers": Whole(1, "give the number of readers, 1 for rank 0 alone", most=2**16),
    "degrees": Sizes(),
    "method": Word(GROUP_METHODS),
    "stages": NumStages(),
    "exchange_parts": Whole(1, "give the most parts in which heads are exchanged, 1 for all at once", most=2**20),
    "interleave": Whole(1, "give the layer ranges of every pipeline stage, 1 for one each", most=2**20),
    "lend_stages": Flag(),
    "spread_head": Flag(),
    "compile_layers": Flag(is_optional=True),
    "frozen_weights": Word(("unchanged", "fp8")),
    "parameters": Word((*PARAMETERS, "auto")),
    "shard_ranks": Whole(2, "give at least 2 ranks, or parameters='replicated'", is_optional=True, most=2**20),
    "expert_ranks": Whole(2, "give at least 2 ranks, or leave it out", is_optional=True, most=2**20),
    "solver": Word(SOLVERS),
    "solver_time_limit_s": _SECONDS,
    "static_degree": _COUNT,
    "micro_batch_trials": Whole(1, "at least 1 is needed", most=2**20),
    "time_aware": Flag(),
    "nested": Flag(),
    "node_aligned": Flag(),
    "hardware": Text(),
    "calibration_steps": _COUNT,
    "resume_partial": Flag(),
    "async_save": Flag(),
    "collective_timeout_s": _SECONDS,
    "fp32_gradients": Flag(),
    "fp32_master_weights": Flag(),
    "optimizer_states": Word(("device", "host", "auto")),
    "layer_weights": Word(("device", "host", "auto")),
    "self_test": Flag(),
    "on_nonfinite": Word(("stop", "skip")),
    "replica_check_steps": Whole(0, "it cannot be negative", is_optional=True, most=2**31),
    "token_metrics": Word(("auto", "on", "off")),
    "distillation_beta": Number("give 0 (forward KL) to 1 (reverse KL)", may_be_zero=True, most=1.0),
    "distillation_temperature": Number("give more than 0"),
    "distillation_weight": Number("give more than 0; without a distance, leave the teacher out", most=1.0),
    "distillation_top_k": Whole(1, "give the number of tokens to compare, or leave it out", is_optional=True),
    "report_steps": Flag(),
    "timeline_steps": _COUNT,
}
