"""`hf-longctx plan` and `hf-longctx simulate`: forecast the time and memory of a training step without running it.

Only argparse is imported here; numpy and the planner are imported when a command runs, torch never is. With `--tokenizer`, tokens
of texts and conversations are counted as `tokenise_text` and `tokenise_chat` make them for training.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_longctx.cli.terminal import explain, say_refusal

if TYPE_CHECKING:
    from hf_longctx.plan.core.types import Media
    from hf_longctx.plan.cost.cost_model import CostModel
    from hf_longctx.plan.model.towers import TowerSpec
    from hf_longctx.plan.setup import DeviceMemory
    from hf_longctx.sim.execution import Price
    from hf_longctx.sim.forecast import Forecast
    from hf_longctx.sim.output.json_records import PlanFile
    from hf_longctx.sim.scenario import Request

if TYPE_CHECKING:
    from hf_longctx.sim.workloads import UncountedRow

_DEFAULT_BATCH = 512
_DEFAULT_STEPS = 3
_MOST_NUMBER = 1e9
# Gbit/s of a node's network that counts as slow: plain Ethernet
_SLOW_GBIT = 25.0


def _up_to(most: int) -> Callable[[str], int]:
    """Reads a whole number of at most `most`; smaller limits depend on other options and are checked later."""

    def whole_number(text: str) -> int:
        number = _parsed(int, text) if len(text) < 25 else most + 1
        if number > most:
            raise argparse.ArgumentTypeError(f"{text[:30]} is too large; give at most {most}")
        return number

    return whole_number


def _parsed(kind: Callable[[str], Any], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:30]!r} is not a {'whole ' if kind is int else ''}number") from None


def _finite(text: str) -> float:
    """Reads a finite number."""
    number = _parsed(float, text)
    if not abs(number) < _MOST_NUMBER:
        raise argparse.ArgumentTypeError(f"{text[:30]} is not a finite number below {_MOST_NUMBER:g}")
    return number


# readers of numbers: more ranks or tokens than these are mistakes, which would take long to refuse later
_RANKS, _TOKENS, _SEQUENCES = _up_to(2**14), _up_to(2**31), _up_to(10**7)

_EXAMPLES = (
    "hf-longctx plan --model qwen3-8b --gpus 8 --hardware h100",
    "hf-longctx plan --model Qwen/Qwen3-8B --gpus 8 --hardware h100 --lora-rank 16 --details",
    "hf-longctx plan --list models",
    "hf-longctx plan --model gpt-7b --lengths lognormal:6.963,1.6 --gpus 64 --hardware a100-40g",
    "hf-longctx plan --model checkpoint --lengths chats.jsonl:messages --tokenizer checkpoint --gpus 8 --hardware h100",
    "hf-longctx plan --model llama-3.1-70b --lengths lognormal:9,1.5 --gpus 64 --hardware h100 --global-batch 64 --ablation",
    "hf-longctx plan --model checkpoint/config.json --lengths tokens.jsonl:input_ids --gpus 16 --hardware h200 --output forecast",
)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hf-longctx plan`."""
    explain(
        parser,
        "Answers how long a sequence may be and how many seconds a step takes, without a GPU.",
        *_EXAMPLES,
        one="it cannot be done, with what would help",
    )
    parser.add_argument("--list", action=_List, choices=("models", "hardware"), help="print the names that are known, and end")
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--model",
        required=True,
        help="a named shape (llama-3.1-8b, qwen3-8b, ...: --list models), a config.json or its folder, or the name of a model "
        "of the hub in the local cache",
    )
    what.add_argument(
        "--lengths",
        help="one length per line (.gz too), a histogram file ('length count' lines), FILE.jsonl:COLUMN (.json, .csv, "
        ".parquet), or lognormal:MU,SIGMA; without it, only memory and the longest sequence are forecast",
    )
    what.add_argument(
        "--tokenizer",
        help="counts the tokens of a COLUMN of text or of chat messages, also with images (column images, or parts of messages): "
        "a local folder, a name on the hub, or 'bytes'",
    )
    what.add_argument(
        "--limit", "--max-length", type=_TOKENS, help="most tokens of a sequence; longer sequences are left out and counted"
    )
    what.add_argument(
        "--global-batch", type=_SEQUENCES, help=f"sequences per step (default: {_DEFAULT_BATCH}, or all if there are fewer)"
    )
    what.add_argument(
        "--steps", type=_SEQUENCES, default=_DEFAULT_STEPS, help="number of steps to plan and average over (default: %(default)s)"
    )
    what.add_argument("--teacher", default="", help="a model whose distribution is learnt; see --model")
    what.add_argument("--seed", type=_TOKENS, default=0, help="seed of the shuffle and of sampled lengths (default: %(default)s)")
    add_machine_arguments(parser, is_required=True)
    how = add_how_arguments(parser)
    how.add_argument(
        "--ablation", action="store_true", help="also plan with pipelines: FlexSP, Seq1F1B, InfiniPipe and SPPO alone, and all"
    )
    out = _add_output_arguments(parser, "plan.json, report.txt, timeline.png, trace.json (Perfetto) and lengths.png")
    out.add_argument("--details", action="store_true", help="print all tables, not only the answer (implied by --ablation)")
    out.add_argument(
        "--price-per-gpu-hour", type=_finite, metavar="USD", help="price of a GPU hour (default: a listed one, for some hardware)"
    )


def add_how_arguments(parser: argparse.ArgumentParser) -> Any:
    """Add the options of training under plans; returns their group."""
    how = parser.add_argument_group("how to train", "options that are left out are chosen by the program")
    how.add_argument(
        "--parameters",
        choices=("auto", "replicated", "sharded", "gathered_per_node", "gathered_per_step", "gathered_per_round"),
        help="how weights and states are held; auto: the fastest for the first step of --lengths that fits (default: replicated "
        "if that fits, else sharded; in stages auto)",
    )
    how.add_argument(
        "--stages",
        type=_stages,
        default=0,
        metavar="N|auto",
        help="number of pipeline stages, 1 for none; auto: as many as are fastest for the first step (default: auto on several "
        "nodes with --lengths, else 1)",
    )
    how.add_argument("--shard-ranks", type=_RANKS, default=0, help="ranks sharing one copy of sharded states (default: all)")
    how.add_argument(
        "--expert-ranks",
        type=_RANKS,
        default=0,
        help="ranks over which experts are spread; tokens travel to them (default: none)",
    )
    how.add_argument("--dtype", default="", help="bfloat16 (default) or float32, for weights and saved activations")
    how.add_argument(
        "--bf16-updates",
        action="store_true",
        help="no fp32 copies of bf16 weights, as with fp32_master_weights: false (default: weights are updated in fp32)",
    )
    how.add_argument(
        "--optim",
        choices=("adamw_torch", "adamw_torch_8bit", "adamw_torch_4bit"),
        default="adamw_torch",
        help="AdamW with plain moments, or torchao's, which keeps them in 8 or 4 bits (default: %(default)s)",
    )
    how.add_argument(
        "--optimizer-states",
        choices=("device", "host", "auto"),
        default="device",
        help="where the optimizer's states and fp32 copies of weights lie; auto: on the host if the longest sequence needs it "
        "(default: %(default)s)",
    )
    how.add_argument(
        "--layer-weights",
        choices=("device", "host", "auto"),
        default="device",
        help="where shards of layers lie while a step computes; auto: on the host if the longest sequence needs it; for sharded "
        "parameters (default: %(default)s)",
    )
    how.add_argument(
        "--lora-rank", type=_RANKS, default=0, help="rank of adapters on all matrices; 0 trains all weights (default)"
    )
    how.add_argument(
        "--lora-experts",
        action="store_true",
        help="with --lora-rank: the weights of routed experts have adapters, too (PEFT's target_parameters)",
    )
    how.add_argument(
        "--quantize",
        default="",
        metavar="nf4",
        help="freeze the weights below adapters in four bits (QLoRA); of a mixture, its experts alone, also as fp8 or mxfp4, as "
        "by default for GPT-OSS (none: in the dtype)",
    )
    how.add_argument(
        "--frozen-weights",
        choices=("unchanged", "fp8"),
        default="unchanged",
        help="fp8: the frozen matrices below adapters are rounded to eight bits (default: %(default)s)",
    )
    how.add_argument(
        "--host-gib",
        type=_finite,
        help="host memory of each rank, for states and layers that lie there and for saved tensors beside them (default: the "
        "profile's)",
    )
    how.add_argument(
        "--expandable-segments",
        action="store_true",
        help="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, with which a run leaves 8 %% of a device free, not a fifth",
    )
    how.add_argument(
        "--activations", choices=("auto", "keep"), default="auto", help="auto: recompute and offload as needed; keep: never"
    )
    how.add_argument(
        "--compile-layers",
        action=argparse.BooleanOptionalAction,
        help="norms, gated MLPs and rotary embeddings run as kernels, as compile_layers has it (default: on GPUs)",
    )
    how.add_argument(
        "--spread-head",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the last pipeline stages share the output head where that is faster (default: yes)",
    )
    how.add_argument("--degrees", type=_degrees, default=(), help="allowed sizes of sequence groups, for example 1,2,4,8")
    how.add_argument("--method", choices=("auto", "ulysses", "ring", "hybrid"), default="auto", help="how groups share attention")
    how.add_argument("--solver", default="auto", help="auto, greedy, lp, milp or static (default: %(default)s)")
    how.add_argument(
        "--solver-time-limit", type=_finite, default=10.0, help="seconds per step for lp and milp (default: %(default)s)"
    )
    how.add_argument("--tokens-per-rank", type=_TOKENS, default=0, help="most tokens a rank holds (default: as memory allows)")
    return how


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hf-longctx simulate`."""
    explain(
        parser,
        "Runs a saved plan under a cost model: seconds, waiting and bytes of every rank.",
        "hf-longctx simulate forecast/plan.json",
        "hf-longctx simulate plan.json --model qwen3-8b --hardware h100 --output simulated",
    )
    parser.add_argument("plan", type=Path, help="output of `hf-longctx plan --json`, or a bare plan (`plan_to_json`)")
    parser.add_argument("--model", help="price the plan for this model; needed for a bare plan")
    parser.add_argument("--dtype", default="", help="bfloat16 (default) or float32")
    parser.add_argument("--shard-ranks", type=_RANKS, default=0, help="ranks sharing one copy of sharded states (default: all)")
    add_machine_arguments(parser, is_required=False)
    _add_output_arguments(parser, "timeline.png, trace.json (Perfetto) and report.txt")


def add_machine_arguments(parser: argparse.ArgumentParser, is_required: bool) -> None:
    """Add the options of the machine; `plan`, which requires them, has more."""
    where = parser.add_argument_group("where to train")
    if is_required:
        where.add_argument("--gpus", type=_RANKS, default=1, help="number of ranks, one device each (default: 1)")
    where.add_argument(
        "--ranks-per-node",
        type=_RANKS,
        default=0,
        help="devices per node (default: those of the hardware, mostly 8, or all if fewer)",
    )
    where.add_argument(
        "--hardware", required=is_required, help="a hardware profile (h100, ...: --list hardware), or the path of one"
    )
    if is_required:
        where.add_argument(
            "--slow-network",
            type=_finite,
            nargs="?",
            const=_SLOW_GBIT,
            default=0.0,
            metavar="GBIT",
            help="nodes are linked at this many Gbit/s, shared by their ranks (default: %(const)g; without it: the profile's)",
        )


class _List(argparse.Action):
    """Prints the models or the hardware known by name, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None) -> None:
        from hf_longctx.sim.output.tables import hardware_table, model_table

        print(model_table() if values == "models" else hardware_table())
        parser.exit()


def _add_output_arguments(parser: argparse.ArgumentParser, files: str) -> Any:
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON and nothing else")
    out.add_argument("--output", type=Path, metavar="DIR", help=f"also write {files} into this folder")
    return out


def _degrees(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({_RANKS(word) for word in text.split(",")}))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; give a list of numbers such as 1,2,4,8") from None


def _stages(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        number = _RANKS(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; give a number of stages, or auto") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1; give 1 for no pipeline, or auto")
    return number


def run_plan(options: argparse.Namespace) -> int:
    """Print the forecast; the exit status is 1 for errors that the user can fix."""
    try:
        if options.output:
            from hf_longctx.sim.output.pictures import check_pictures, write_forecast

            check_pictures()
        from hf_longctx.sim.execution import price_of

        price = price_of(options.hardware, options.price_per_gpu_hour)
        forecast = _forecast(options)
        if options.output:
            write_forecast(forecast, options.output)
    except (OSError, ValueError) as error:
        return say_refusal("plan", error)
    _print_forecast(forecast, price, options)
    return 0


def _print_forecast(forecast: Forecast, price: Price | None, options: argparse.Namespace) -> None:
    from hf_longctx.cli.terminal import print_sections, print_summary

    if options.json:
        import json

        from hf_longctx.sim.output.json_records import forecast_record

        print(json.dumps(forecast_record(forecast, price), indent=2))
    elif options.details or options.ablation:
        from hf_longctx.sim.output.text import forecast_sections

        print_sections(forecast_sections(forecast))
    else:
        from hf_longctx.sim.output.summary import answer, forecast_summary, summary_rows

        print_summary(answer(forecast), summary_rows(forecast, price), forecast_summary(forecast, price))


def _model_folder(name: str) -> str:
    """Return the folder of a hub model in the local cache, or the name unchanged."""
    from hf_longctx.sim.models import cached_folder

    return str(cached_folder(name) or name)


def _forecast(options: argparse.Namespace) -> Forecast:
    from hf_longctx.sim.forecast import make_forecast
    from hf_longctx.sim.scenario import build_scenario
    from hf_longctx.sim.workloads import read_workload

    if options.steps < 1:
        raise ValueError(f"--steps is {options.steps}; at least one step must be planned")
    if options.global_batch is not None and options.global_batch < 1:
        raise ValueError(f"--global-batch is {options.global_batch}; a step needs at least one sequence")
    wanted = options.global_batch or _DEFAULT_BATCH
    workload = None
    counter = TokenCounter(options.tokenizer) if options.tokenizer else None
    if options.lengths is not None:
        workload = read_workload(options.lengths, options.limit, wanted * options.steps, options.seed, counter)
    if counter is not None and not counter.was_used:
        raise ValueError("--tokenizer has no effect, since --lengths names no column of text or messages; leave it out")
    batch = options.global_batch or min(wanted, workload.num_sequences if workload else wanted)
    first = workload.draw_steps(options.steps, batch, options.seed)[0] if workload else ()
    has_images = counter is not None and counter.has_images
    scenario = build_scenario(replace(request_of(options, workload.longest if workload else 0, first), has_images=has_images))
    if workload is not None and counter is not None and has_images:
        workload = replace(workload, media=counter.media_of(scenario.costs.model.tower))
        if not workload.media:
            caveat = "images count by their tokens alone, since the config of the model names no tower that is known"
            scenario = replace(scenario, caveats=(*scenario.caveats, caveat), notes=(*scenario.notes, caveat))
    if options.ablation and workload is None:
        raise ValueError("--ablation compares plans for sequences; give --lengths too")
    return make_forecast(scenario, workload, options.steps, batch, options.seed, options.ablation)


def request_of(options: argparse.Namespace, longest_tokens: int, step_lengths: Sequence[int] = ()) -> Request:
    """Make the request of these options; raises ValueError for impossible numbers.

    step_lengths: tokens of the sequences of a step, by which the number of stages is chosen.
    """
    from hf_longctx.sim.scenario import Request

    if options.host_gib is not None and options.host_gib < 0:
        raise ValueError(f"--host-gib is {options.host_gib:g}; give 0 or more, or leave it out")
    # options with the name of a field
    given: dict[str, Any] = {name: value for name, value in vars(options).items() if name in Request.__dataclass_fields__}
    given |= {
        "model": _model_folder(options.model),
        "teacher": _model_folder(options.teacher) if options.teacher else "",
        "name": options.model,
        "num_ranks": options.gpus,
        "network_gbit": options.slow_network,
        "parameters": options.parameters or "",
        "longest_tokens": longest_tokens,
        "step_lengths": tuple(step_lengths),
        "solver_time_limit_s": options.solver_time_limit,
        "host_bytes": -1 if options.host_gib is None else int(options.host_gib * 2**30),
    }
    return Request(**given)


def run_simulate(options: argparse.Namespace) -> int:
    """Print the predicted run of a saved plan; the exit status is 1 for errors that the user can fix."""
    try:
        _simulate(options)
    except (OSError, ValueError) as error:
        return say_refusal("simulate", error, options.plan)
    except ArithmeticError as error:
        # impossible sizes in a file that was changed by hand, such as an index that chooses 0 tokens
        why = f"seconds cannot be computed from its cost model ({error}); write it again with hf-longctx plan --json"
        return say_refusal("simulate", ValueError(why), options.plan)
    return 0


def _simulate(options: argparse.Namespace) -> None:
    import json

    from hf_longctx.cli.terminal import print_sections
    from hf_longctx.plan.core.validate import validate_plan
    from hf_longctx.sim.execution import execute_plan
    from hf_longctx.sim.output.json_records import execution_record, read_plan_file
    from hf_longctx.sim.output.tables import as_text
    from hf_longctx.sim.output.text import execution_lines

    file = read_plan_file(options.plan.read_text())
    plan = validate_plan(file.plan)
    costs, memory = _priced(options, file)
    execution = execute_plan(plan, costs)
    lines = execution_lines(plan, execution, costs, memory)
    if options.output:
        from hf_longctx.sim.output.pictures import check_pictures, write_execution

        check_pictures()
        write_execution(plan, execution, as_text([lines]), options.output)
    if options.json:
        print(json.dumps(execution_record(plan, execution, costs, memory), indent=2))
    else:
        print_sections([lines])


def _optimizer_of(file: PlanFile) -> str:
    from hf_longctx.sim.scenario import optimizer_of

    return optimizer_of(file.costs.model.moment_bytes if file.costs else 0.0)


def _priced(options: argparse.Namespace, file: PlanFile) -> tuple[CostModel, DeviceMemory]:
    """Return cost model and device memory of a plan: those of the options, or else of the file."""
    from hf_longctx.plan.cost.catalog import has_kernels
    from hf_longctx.sim.scenario import Request, build_scenario

    changes = [name for name in ("model", "hardware", "dtype", "shard_ranks", "ranks_per_node") if getattr(options, name)]
    if file.costs is not None and file.memory is not None and not changes:
        return file.costs, file.memory
    model, hardware = options.model or file.model_name, options.hardware or file.hardware_name
    for name, value in (("model", model), ("hardware", hardware)):
        if not value:
            raise ValueError(f"the file is a bare plan and does not say which {name} to price it for; add --{name} NAME")
    request = Request(
        model=_model_folder(model),
        name=model,
        hardware=hardware,
        num_ranks=file.plan.num_ranks,
        ranks_per_node=options.ranks_per_node or (file.costs.cluster.ranks_per_node if file.costs else 0),
        dtype=options.dtype,
        parameters=file.plan.parameters,
        shard_ranks=options.shard_ranks or (file.costs.shard_ranks if file.costs and file.costs.shard_ranks > 1 else 0),
        stages=file.plan.num_stages,
        expert_ranks=file.costs.model.experts.num_ranks if file.costs and file.costs.model.experts.are_spread else 0,
        # for another model or machine, use the kernels that a run there would have
        compile_layers=None if file.costs is None or options.model or options.hardware else has_kernels(file.costs.model),
        bf16_updates=file.costs is not None and not file.costs.model.has_master_weights,
        optim=_optimizer_of(file),
        optimizer_states="host" if file.costs is not None and file.costs.model.updates_on_host else "device",
        layer_weights="host" if file.costs is not None and file.costs.model.layers_on_host else "device",
    )
    scenario = build_scenario(request, must_fit=False)
    return scenario.costs, scenario.memory


_BATCH_ROWS = 256


class TokenCounter:
    """Counts tokens with a tokenizer that is loaded for the first row.

    was_used: whether there was such a row. has_images: whether a row had images.
    """

    def __init__(self, name: str) -> None:
        self.name, self.was_used = name, False
        # counts the tokens of images; None before the first row with images
        self._images: Any = None
        # images of every row, by its tokens
        self._media: dict[int, list[list[Any]]] = {}

    @property
    def has_images(self) -> bool:
        return self._images is not None

    def media_of(self, tower: TowerSpec) -> dict[int, list[Media]]:
        """Returns what a tower reads for every row, by the row's tokens; empty for an unknown tower."""
        from hf_longctx.hf.data.media.rows import tower_work

        return {
            length: [tuple(work for medium in row for work in tower_work(medium, tower)) for row in rows]
            for length, rows in self._media.items()
            if not tower.is_empty
        }

    def __call__(self, rows: Sequence[UncountedRow]) -> list[int]:
        """Returns the number of tokens of each row; 0 for a text without characters, which training skips."""
        self.was_used = True
        tokenizer = self._load()
        counts: list[int] = []
        for first in range(0, len(rows), _BATCH_ROWS):
            media: dict[str, list[Any]] = {}
            batch = rows[first : first + _BATCH_ROWS]
            found = list(_counted(tokenizer, batch, partial(self._with_images, media)))
            for row, count in zip(batch, found, strict=True):
                self._media.setdefault(count, []).append(media.get(row.place, []))
            counts += found
        return counts

    def _with_images(self, media: dict[str, list[Any]], row: UncountedRow) -> int:
        """Returns the number of tokens of a conversation with images, as `tokenise_chat` makes them."""
        from hf_longctx.hf.data.chat import RenderedText, read_messages, read_tools, render_text
        from hf_longctx.hf.data.media.messages import media_of_row, place_media
        from hf_longctx.hf.data.media.processors import MediaTokens, expanded, processor_problem, tokenizer_of

        if self._images is None:
            from transformers import AutoProcessor

            try:
                found = AutoProcessor.from_pretrained(self.name)
                reason = processor_problem(found)
            except (OSError, ValueError, KeyError, ImportError) as error:
                reason = str(error).strip().split("\n")[0]
            if reason:
                raise ValueError(
                    f"{row.place}: a conversation with images, whose tokens {self.name!r} cannot count ({reason}); give "
                    f"--tokenizer a multimodal model's folder or name"
                )
            self._images = MediaTokens(found)
        tokenizer, messages = tokenizer_of(self._images.processor), read_messages(row.value, row.place, True)
        messages, files = place_media(messages, media_of_row(dict(row.images), row.place), self._images.kinds, row.place)
        text = render_text(tokenizer, messages, read_tools(row.tools, row.place), row.place)
        text = self._images.framed(RenderedText(text, ())).text
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids, _, media[row.place], _ = expanded(ids, ids, files, self._images, row.place, -100)
        return len(ids)

    def _load(self) -> Any:
        from transformers import AutoTokenizer, ByT5Tokenizer

        from hf_longctx.hf.data.chat import with_training_template

        if self.name == "bytes":
            return ByT5Tokenizer(extra_ids=0)
        try:
            return with_training_template(AutoTokenizer.from_pretrained(self.name))
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(
                f"--tokenizer {self.name!r} cannot be loaded ({reason}); give a folder with a tokenizer, a name on the hub, or "
                f"'bytes'"
            ) from error


def _counted(tokenizer: Any, rows: Sequence[UncountedRow], with_images: Callable[[UncountedRow], int]) -> Iterator[int]:
    texts = [row for row in rows if isinstance(row.value, str) and row.value]
    for row in texts:
        if found := [name for name, value in row.images.items() if value]:
            raise ValueError(
                f"{row.place}: a text beside {found[0]!r}, whose places are in conversations alone, so that its tokens cannot be "
                f"counted; name a column of messages, or one of token ids (input_ids) of rows from tokenise_completions"
            )
    ids = tokenizer([row.value for row in texts], verbose=False)["input_ids"] if texts else []
    end = tokenizer.eos_token_id
    by_place = {row.place: len(own) + (end is not None and own[-1:] != [end]) for row, own in zip(texts, ids, strict=True)}
    for row in rows:
        if isinstance(row.value, str):
            yield by_place.get(row.place, 0)
        else:
            yield with_images(row) if _has_images(row) else _chat_tokens(tokenizer, row)


def _has_images(row: UncountedRow) -> bool:
    """Whether a conversation has images or videos, in parts of its messages or beside them."""
    contents = [message.get("content") for message in row.value]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(row.images.values()) or any(isinstance(part, dict) and part.get("type") in ("image", "video") for part in parts)


def _chat_tokens(tokenizer: Any, row: UncountedRow) -> int:
    from hf_longctx.hf.data.chat import read_messages, read_tools, render_text

    if not tokenizer.chat_template:
        raise ValueError(
            f"{row.place}: a conversation, but the tokenizer has no chat template to turn it into text; give --tokenizer a "
            f"folder whose tokenizer has one"
        )
    messages, tools = read_messages(row.value, row.place), read_tools(row.tools, row.place)
    text = render_text(tokenizer, messages, tools, row.place)
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
