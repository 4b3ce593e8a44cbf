"""`LongContextConfig`: every setting of a user, and the only place besides `cli` that reads the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hf_longctx.hf.setting_kinds import Flag, Kind, Number, Sizes, Text, Whole, Word
from hf_longctx.hf.setting_kinds import Stages as NumStages
from hf_longctx.plan.core.planner_config import GROUP_METHODS, SOLVERS
from hf_longctx.plan.core.types import PARAMETERS

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
    """How sequences are cut, spread and reported. Ready for `HfArgumentParser`; the common fields come first.

    Example:

        config = LongContextConfig(max_length=32768, long_sequences="split", tokens_per_rank=8192)
        trainer = LongContextTrainer(model=model, args=args, train_dataset=dataset, longctx_config=config)
        trainer.train()
    """

    max_length: int | None = field(
        default=None, metadata={"help": "Longest sequence in tokens. Default: the model's max_position_embeddings."}
    )
    long_sequences: Literal["error", "truncate", "split"] = field(
        default="error",
        metadata={
            "help": "What to do with a sequence above max_length or above what memory holds: stop before training with its "
            "number and length ('error'), drop its tail ('truncate'), or cut it into independent documents ('split')."
        },
    )
    tokens_per_rank: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens one rank holds at once; a group of d ranks takes d times as many. Default: what fits into "
            "the device's memory by a formula."
        },
    )
    activations: Literal["auto", "keep"] = field(
        default="auto",
        metadata={
            "help": "What chunks do that do not fit with everything they save for backward. 'auto': linear programs choose for "
            "every layer what is kept, waits on the host or is computed again, at the fewest seconds. 'keep': nothing is "
            "computed again, so that tokens_per_rank is what fits as it is."
        },
    )
    device_gib: float | None = field(
        default=None,
        metadata={"help": "GiB of a device that a rank may use, communicators included. Default: four fifths of its memory."},
    )
    host_gib: float | None = field(
        default=None,
        metadata={
            "help": "Most GiB of host memory for saved tensors, for each rank; on CUDA what plans need of it is pinned before "
            "the first step, and more between steps; 0: none are offloaded. Default: half of the machine's memory, shared by its "
            "ranks, at most 64 each; for ranks on CPU 0."
        },
    )
    tile_tokens: int = field(
        default=2048,
        metadata={
            "help": "Token tile of MLP, norms, and output head with loss in chunks that do not keep everything; 0: untiled. "
            "Logits are never there as a whole where it is set."
        },
    )
    tokens_per_step: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of an optimizer step on average, by at most one sequence more or less. Default: count sequences "
            "instead, per_device_train_batch_size times the number of ranks."
        },
    )
    lookahead_batches: int | None = field(
        default=None,
        metadata={
            "help": "Needed for an iterable train_dataset, and only there: global batches that rank 0 may read ahead of the "
            "step that is running, and holds in memory."
        },
    )
    degrees: Degrees | None = field(
        default=None,
        metadata={
            "help": "Allowed sizes of sequence groups, any; with method 'ulysses' powers of two or all ranks, none above the "
            "number of attention heads. 'all': every size up to 8, multiples of 8 up to 64, and the default ones, which are "
            "powers of two and all ranks."
        },
    )
    method: Literal["auto", "ulysses", "ring", "hybrid"] = field(
        default="auto",
        metadata={
            "help": "How a group of two or more ranks shares attention. 'ulysses': all-to-all between tokens and heads, at most "
            "as many ranks as heads. 'ring': keys and values pass from rank to rank, any degree. 'hybrid': Ulysses inside "
            "blocks of ranks (as many as KV heads and node allow), a ring across. 'auto': the cheapest for every degree."
        },
    )
    stages: Stages = field(
        default=1,
        metadata={
            "help": "Pipeline stages: the ranks are divided among so many, each of which holds a part of the layers, and long "
            "sequences pass them in slices. 1: no pipeline. 'auto': what is predicted to be fastest on a sample of the training "
            "set."
        },
    )
    interleave: int = field(
        default=1,
        metadata={
            "help": "Layer ranges of every pipeline stage: with 2 or more, stages take turns along the layers, which shortens "
            "the idle time at a step's ends and sends more messages. Used where a sample of the training set is predicted to "
            "be faster with it, and always by load_pipeline_stage. 1: one range per stage. Needs stages and replicated "
            "parameters."
        },
    )
    lend_stages: bool = field(
        default=False,
        metadata={
            "help": "Stages that would be idle while a long sequence enters and leaves the pipeline run some of its slices for "
            "the others, where that is predicted to be faster. Every rank then holds the weights of all stages. Needs stages, "
            "adapters (LoRA) and replicated parameters."
        },
    )
    compile_layers: bool = field(
        default=False,
        metadata={
            "help": "Let torch.compile make one kernel each of norms, gated activations and rotary embeddings, in the classes of "
            "transformers that compute them as Llama or Gemma do. Needs a C++ compiler on CPU and Triton on a GPU; without, a "
            "logged line says that layers run their own code. Not for the callback without attach."
        },
    )
    parameters: Literal["replicated", "sharded", "gathered_per_round"] = field(
        default="replicated",
        metadata={
            "help": "How weights, gradients and optimizer states live. 'replicated': whole on every rank. 'sharded': split over "
            "ranks (FSDP2), gathered layer by layer in every forward and backward. 'gathered_per_round': split too, but gathered "
            "once per micro-batch, which takes room for all weights."
        },
    )
    shard_ranks: int | None = field(
        default=None,
        metadata={
            "help": "Ranks that share one copy of sharded parameters, for example those of a node (HSDP): copies of the shards "
            "across nodes. Default: all ranks."
        },
    )
    expert_ranks: int | None = field(
        default=None,
        metadata={
            "help": "Ranks over which the experts of a mixture are spread: each holds its share of them whole, tokens travel to "
            "them, and their weights are never gathered. These ranks also share one copy of the other sharded parameters, so "
            "shard_ranks is the same number or left out. Needs parameters 'sharded'. Default: experts are gathered like other "
            "weights."
        },
    )
    solver: Literal["auto", "greedy", "lp", "milp", "static"] = field(
        default="auto",
        metadata={
            "help": "'auto': exact for few sequences, else greedy. 'greedy': the fast planner. 'lp' and 'milp': linear or "
            "integer programs improve greedy's plan for solver_time_limit_s. 'static': one degree for all groups, as a baseline."
        },
    )
    solver_time_limit_s: float = field(
        default=10.0, metadata={"help": "Seconds that solvers 'lp' and 'milp' may take to plan one step; it is planned ahead."}
    )
    static_degree: int = field(
        default=0, metadata={"help": "The degree of solver 'static'; 0 picks the best one for every step."}
    )
    micro_batch_trials: int = field(
        default=5, metadata={"help": "How many numbers of micro-batches the planner tries, from the fewest that fit."}
    )
    time_aware: bool = field(
        default=True,
        metadata={
            "help": "Cut micro-batches by time as well as by tokens, and move sequences between them to fill their slack. "
            "Without effect on solver 'static', and where every forward is one plan (the callback without attach)."
        },
    )
    nested: bool = field(
        default=True,
        metadata={
            "help": "A rank changes groups inside a step and waits for its partners alone, with shard_ranks for its block. "
            "Without effect where parameters are sharded over all ranks, which then wait for each other at every micro-batch, "
            "and where every forward is one plan (the callback without attach)."
        },
    )
    node_aligned: bool = field(
        default=True,
        metadata={
            "help": "Place groups that fit into a node inside one. Without effect on one node; powers of two lie inside nodes of "
            "as many ranks anyway."
        },
    )
    hardware: str = field(
        default="",
        metadata={
            "help": "What the first plans are priced by: a file that `hf-longctx calibrate --output FILE` wrote, or a shipped "
            "profile's name (a100-80g, h100, ...). Default: a guess."
        },
    )
    calibration_steps: int = field(
        default=4,
        metadata={
            "help": "Warm-up steps whose measured chunks give the cost coefficients; they favour one degree after the other, and "
            "the log shows '-' for predicted seconds. Later steps fit again where predictions are off. 0 keeps what the run "
            "starts with."
        },
    )
    resume_partial: bool = field(
        default=False,
        metadata={
            "help": "Resume from a checkpoint whose weights are there even if other parts (optimizer, schedule, random numbers, "
            "count of steps, data record) are missing or damaged; the log says what starts anew. False: refuse it, naming the "
            "files."
        },
    )
    async_save: bool = field(
        default=False,
        metadata={
            "help": "Write checkpoints behind training: at a save, training stands still until all files are in host memory "
            "(/dev/shm); a thread of each rank writes them to output_dir, one checkpoint at a time. An error of the thread is "
            "raised on all ranks at a later step. Not for the callback without attach, whose steps begin without an exchange."
        },
    )
    collective_timeout_s: float = field(
        default=60.0,
        metadata={"help": "Seconds after which ranks that wait for a dead or hanging rank give up with an error."},
    )
    fp32_gradients: bool = field(
        default=True,
        metadata={
            "help": "Add the gradients of bf16 weights in fp32 buffers (4 bytes per parameter); small chunks would be rounded "
            "away in bf16. Without effect on fp32 weights."
        },
    )
    fp32_master_weights: bool = field(
        default=True,
        metadata={
            "help": "Let the optimizer update an fp32 copy of every bf16 weight that is trained, with moments in fp32 (8 more "
            "bytes per parameter). At usual learning rates most updates would be rounded away in bf16. Without effect on fp32 "
            "weights, such as those of adapters."
        },
    )
    optimizer_states: Literal["device", "host"] = field(
        default="device",
        metadata={
            "help": "Where the optimizer's states and the fp32 copies of weights lie. 'host': in host memory (16 bytes per "
            "trained parameter of a rank), where the CPU updates the weights: the device keeps only weights and gradients, and "
            "steps get slower."
        },
    )
    self_test: bool = field(
        default=True,
        metadata={
            "help": "Seconds at start: a copy of the model with one layer of every kind runs small plans of every shape and is "
            "compared with plain transformers, in fp64; the run stops where they differ. Left out, with a logged line, where "
            "each rank loads its own pipeline stage or memory has no room for the copy."
        },
    )
    on_nonfinite: Literal["stop", "skip"] = field(
        default="stop",
        metadata={
            "help": "What to do with a step whose loss or gradients are NaN or infinite, before any weight changes. 'stop': end "
            "the run on all ranks, naming the sequences and the first module concerned, and save the step for `hf-longctx "
            "replay`. 'skip': leave the step out; the log counts such steps as skipped_steps."
        },
    )
    replica_check_steps: int | None = field(
        default=None,
        metadata={
            "help": "Every how many steps the ranks that hold copies of the same weights compare checksums of them; a rank that "
            "has drifted apart stops the run by its number. 0: never. Default: before every checkpoint."
        },
    )
    token_metrics: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "help": "Log token accuracy and entropy of training steps as TRL does (mean_token_accuracy, entropy, num_tokens), "
            "from the tiles in which the loss is computed. 'auto': with TRL's SFTTrainer. 'on': with any trainer of a language "
            "model. Not for the callback without attach."
        },
    )
    report_steps: bool = field(default=True, metadata={"help": "Print one line per step on rank 0."})
    timeline_steps: int = field(
        default=3,
        metadata={
            "help": "Steps in the pictures timeline.svg and timeline.json (Chrome trace) written to output_dir at the end; 0 "
            "writes none."
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
                f"shard_ranks is {self.shard_ranks} but parameters are 'replicated'; it has an effect with parameters 'sharded' "
                f"or 'gathered_per_round' only"
            )
        if self.expert_ranks is not None:
            self._check_expert_ranks(self.expert_ranks)
        if self.static_degree and self.solver != "static":
            raise ValueError(
                f"static_degree is {self.static_degree} but solver is {self.solver!r}; it has an effect with solver 'static' only"
            )

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
    "tile_tokens": Whole(0, "it cannot be negative (0: untiled)"),
    "tokens_per_step": _TOKENS,
    "lookahead_batches": Whole(1, "at least 1 global batch must be read ahead", is_optional=True, most=2**31),
    "degrees": Sizes(),
    "method": Word(GROUP_METHODS),
    "stages": NumStages(),
    "interleave": Whole(1, "give the layer ranges of every pipeline stage, 1 for one each", most=2**20),
    "lend_stages": Flag(),
    "compile_layers": Flag(),
    "parameters": Word(PARAMETERS),
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
    "optimizer_states": Word(("device", "host")),
    "self_test": Flag(),
    "on_nonfinite": Word(("stop", "skip")),
    "replica_check_steps": Whole(0, "it cannot be negative", is_optional=True, most=2**31),
    "token_metrics": Word(("auto", "on", "off")),
    "report_steps": Flag(),
    "timeline_steps": _COUNT,
}
