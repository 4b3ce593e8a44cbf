"""Writes forecasts and simulations as text, for a reader who has to choose hardware and settings.

Called by `hf-longctx plan` and `hf-longctx simulate`. The histogram of planned sequences (`length_bins`), also used by the JSON
record and the picture of a forecast, has bins of a factor of two in length, each with the degrees of its sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_longctx.plan.core.messages import counted, duration
from hf_longctx.plan.core.settings import GENERIC_CPU
from hf_longctx.plan.core.types import LEAST_TILE_TOKENS, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel, block_sizes
from hf_longctx.plan.predict.planning import WeightSeconds
from hf_longctx.plan.setup import COMMUNICATOR_BYTES, DeviceMemory, num_communicators, rooms
from hf_longctx.sim.execution import Execution
from hf_longctx.sim.forecast import DegreeUse, Forecast
from hf_longctx.sim.memory_use import MemoryUse, memory_use, peak_bytes
from hf_longctx.sim.output.summary import answer, held_words, state_words, states_words, towers_words
from hf_longctx.sim.output.tables import Table, as_text
from hf_longctx.sim.rivals import Choice
from hf_longctx.sim.scenario import Scenario
from hf_longctx.sim.stages import stage_rows


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Sequences of `low` to `high` - 1 tokens. by_degree: (ranks of the group, sequences, tokens), smallest groups first."""

    low: int
    high: int
    by_degree: tuple[tuple[int, int, int], ...]

    @property
    def num_sequences(self) -> int:
        return sum(count for _, count, _ in self.by_degree)

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, _, tokens in self.by_degree)


def length_bins(forecast: Forecast) -> tuple[LengthBin, ...]:
    """Returns all bins from the shortest to the longest planned sequence, including empty ones; none without steps."""
    counts, tokens = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for length, group in forecast.placed_lengths():
        key = (length.bit_length() - 1, group.degree)
        counts[key] += 1
        tokens[key] += length
    if not counts:
        return ()
    bits = [bit for bit, _ in counts]
    keys = sorted(counts)
    return tuple(
        LengthBin(1 << bit, 2 << bit, tuple((key[1], counts[key], tokens[key]) for key in keys if key[0] == bit))
        for bit in range(min(bits), max(bits) + 1)
    )


_GIB = 2**30
# characters of the longest bar
_BAR = 30
# most micro-batches to list
_MAX_ROWS = 16
# share of the tokens below which the shortest bins are merged
_FEW = 1e-3
# largest relative difference in tokens of otherwise equal ranks that share a row
_FEW_TOKENS = 0.01
# largest relative difference in seconds of plans that count as equal
_EQUAL = 5e-3
# meaning of the names of checkpointings
_CHECKPOINTING_NOTE = (
    "selective checkpointing keeps layer inputs and attention's outputs, full checkpointing layer inputs alone; the loss runs in "
    f"tiles of {LEAST_TILE_TOKENS:,} tokens, as in Liger's kernels"
)


def forecast_text(forecast: Forecast) -> str:
    """Writes the whole report: answer, step, layout with reasons, lengths, baselines, alternatives, memory, longest sequence."""
    return as_text(forecast_sections(forecast))


def forecast_sections(forecast: Forecast) -> list[list[str]]:
    """Makes the sections of the report, each a list of lines and tables."""
    sections = [[answer(forecast), *_head(forecast)]]
    if forecast.steps:
        sections += [_step(forecast), _why(forecast), _lengths(forecast), _baselines(forecast), _rejected(forecast)]
        sections += [_stages(forecast), _ablation(forecast)]
    sections += [_memory(forecast), _longest(forecast)]
    return [lines for lines in sections if lines]


def _head(forecast: Forecast) -> list[str]:
    scenario, workload = forecast.scenario, forecast.workload
    cluster, placement = scenario.costs.cluster, scenario.placement
    states = states_words(placement)
    lines = [
        f"{scenario.model_name} on {cluster.num_ranks} x {cluster.hardware.name}, {cluster.ranks_per_node} per node; "
        f"weights, gradients and optimizer states {states}"
    ]
    if workload is not None:
        dropped = f"; {workload.num_dropped:,} longer than {workload.limit:,} left out" if workload.num_dropped else ""
        lines.append(
            f"{workload.source}: {workload.num_sequences:,} sequences, {workload.num_tokens:,} tokens, median "
            f"{workload.quantile(0.5):,}, 99% up to {workload.quantile(0.99):,}, longest {workload.longest:,}{dropped}"
        )
    return [*lines, *(f"note: {note}" for note in scenario.notes)]


def _step(forecast: Forecast) -> list[str]:
    first = forecast.steps[0].plan
    bound_s = forecast.lower_bound_s
    counted_s, gap = forecast.counted_s, forecast.gap
    counts_gathers = counted_s > forecast.step_s
    limits = "these degrees and this memory" + (", with gathers that nothing hides" if counts_gathers else "")
    counted = f"takes {duration(counted_s)} with them and " if counts_gathers else ""
    over = f"mean of {len(forecast.steps)} steps" if len(forecast.steps) > 1 else "one step"
    return [
        f"STEP  {duration(forecast.taught_step_s)} ({over} of {len(first.lengths):,} sequences), "
        f"{forecast.tokens_per_s:,.0f} tokens/s",
        *_teacher_lines(forecast.weights, "the bound and the comparisons below"),
        f"  lower bound for {limits}: {duration(bound_s)}; this plan {counted}is within {gap:.1%} of optimal",
        f"  {_shares(forecast.share('compute_s'), forecast.share('exchange_s'), forecast.share('idle_s'))}",
        *_weights_lines(forecast.weights, forecast.step_bounds_s),
        *(f"  images: {words}" for words in towers_words(forecast)),
        f"  planned in {duration(first.estimate.solve_s)} on this CPU ({first.estimate.solver}); a run plans one step ahead",
        f"  layout of the first step ({_micro_batches(first)}, <degree x groups>):",
        *_wrapped(first.folded_layouts),
    ]


def _why(forecast: Forecast) -> list[str]:
    uses = forecast.degrees_used
    num_sequences, num_tokens = sum(use.num_sequences for use in uses), sum(use.num_tokens for use in uses)
    rows = [
        (
            str(use.degree),
            use.method,
            f"{use.num_sequences:,} ({use.num_sequences / num_sequences:.0%})",
            f"{use.num_tokens / num_tokens:.0%}",
            f"{use.shortest:,} to {use.longest:,}",
        )
        for use in uses
    ]
    return [
        "WHY  which sequences run in groups of how many ranks",
        *_table(("ranks", "method", "sequences", "tokens", "lengths"), rows),
        *(f"  {sentence}" for sentence in _reasons(forecast, uses)),
    ]


def _reasons(forecast: Forecast, uses: Sequence[DegreeUse]) -> list[str]:
    placement, room = forecast.scenario.placement, forecast.scenario.tokens_per_rank
    longest = max(use.longest for use in uses)
    degrees = placement.degrees
    needed = next((degree for degree in degrees if degree * room >= longest), 0)
    if placement.is_pipeline:
        # sequences run in slices, so tokens of a rank decide nothing here
        sentences = []
    elif not needed:
        sentences = [
            f"a rank holds {room:,} tokens, and more of a sequence that is alone: the longest ({longest:,}) runs in slices where "
            f"it needs them, on {_ranks(degrees[-1])}"
        ]
    elif needed > 1:
        sentences = [
            f"a rank holds {room:,} tokens, so the longest planned sequence ({longest:,}) needs {needed} ranks or more; shorter "
            f"ones run in smaller groups where that saves communication"
        ]
    else:
        why = "; larger groups let all ranks end at the same time" if uses[0].degree > 1 else ""
        sentences = [f"every planned sequence fits on one rank ({room:,} tokens){why}"]
    waiting = "waiting for other stages" if placement.is_pipeline else "waiting for other groups"
    shares = {"computing": "compute_s", "communication": "exchange_s", waiting: "idle_s"}
    ranked = sorted(((forecast.share(name), word) for word, name in shares.items()), reverse=True)
    then = f", then {ranked[1][1]} ({ranked[1][0]:.0%})" if ranked[1][0] > 0 else ""
    sentences.append(f"most rank-seconds go into {ranked[0][1]} ({ranked[0][0]:.0%}){then}")
    return sentences


def _lengths(forecast: Forecast) -> list[str]:
    bins = _fold_start(length_bins(forecast))
    total, tokens = sum(one.num_sequences for one in bins), sum(one.num_tokens for one in bins)
    most = max(one.num_tokens for one in bins)
    rows = [
        (
            f"{one.low:,} to {one.high - 1:,}",
            f"{one.num_sequences / total:.1%}",
            f"{one.num_tokens / tokens:.1%}",
            "#" * round(_BAR * one.num_tokens / most),
        )
        for one in bins
    ]
    return [
        "LENGTHS  of the planned steps; a bar is the bin's share of tokens",
        *_table(("tokens", "sequences", "tokens", ""), rows),
    ]


def _fold_start(bins: Sequence[LengthBin]) -> list[LengthBin]:
    """Merges the bins of the shortest sequences as long as they have almost none of the tokens."""
    folded, total = list(bins), sum(one.num_tokens for one in bins)
    while len(folded) > 1 and folded[0].num_tokens + folded[1].num_tokens < _FEW * total:
        folded[:2] = [LengthBin(folded[0].low, folded[1].high, folded[0].by_degree + folded[1].by_degree)]
    return folded


def _baselines(forecast: Forecast) -> list[str]:
    if not forecast.baselines:
        return []
    memory = forecast.scenario.memory
    keeps = memory.keeps_everything
    settings = "degree and micro-batch" if keeps else "degree, micro-batch and checkpointing"
    # gathers of weights, sums and the optimizer are known only if nothing was measured
    has_most = any(choice.most_s > choice.step_s for choice in forecast.baselines)
    gap = f"{forecast.gap:.1%} above the bound"
    own = ["this plan", duration(forecast.step_s), *([duration(forecast.whole_step_s)] if has_most else []), "", gap]
    rows = [own]
    for choice in forecast.baselines:
        label, seconds, *verdict = _choice_row(choice, forecast.counted_s)
        most = duration(choice.most_s) if choice.is_possible else "-"
        rows.append([label, seconds, *([most] if has_most else []), *verdict])
    head = ("", "seconds", *(["with gathers"] if has_most else []), "this plan", "")
    notes = [] if keeps else [_CHECKPOINTING_NOTE]
    return [
        f"BASELINES  same sequences, same cost model, same memory, each at its best {settings}; static has to hold "
        f"{forecast.context_limit:,} tokens",
        *_table(head, rows),
        *(f"  {note}" for note in notes),
    ]


def _rejected(forecast: Forecast) -> list[str]:
    if not forecast.alternatives:
        return []
    first = forecast.steps[0]
    ours = first.plan.estimate.counted_s
    impossible = [choice for choice in forecast.alternatives if choice.degree and not choice.is_possible]
    # one row for all degrees that are too small, with the reason of the largest one
    rows = [_choice_row(replace(choice, name=f"all groups of {choice.degree} or fewer"), ours) for choice in impossible[-1:]]
    rows += [_choice_row(choice, ours) for choice in forecast.alternatives if choice not in impossible]
    return [
        f"REJECTED  for the first step, against {duration(first.execution.step_s)}",
        *_table(("", "seconds", "this plan", ""), rows),
    ]


def _stages(forecast: Forecast) -> list[str]:
    """Makes the table of numbers of pipeline stages; none if only one number was possible."""
    chosen, num_ranks = forecast.scenario.setup.num_stages, forecast.scenario.placement.num_ranks
    found = stage_rows(forecast.stages, num_ranks)
    if len(found) < 2:
        return []
    rows = []
    for row in found:
        mark = " (chosen)" if row.num_stages == chosen else ""
        cells = ["-"] * 7
        if row.is_possible:
            cells = [
                duration(row.step_s),
                duration(row.counted_s),
                duration(row.most_s),
                duration(row.lower_bound_s),
                f"{row.idle_share:.0%}",
                f"{row.recomputed_share:.0%}",
                _gib(row.peak_bytes),
            ]
        held = held_words(row.parameters, row.shard_ranks) if row.is_possible else "-"
        rows.append([f"{row.num_stages}{mark}", str(row.ranks_per_stage), held, *cells, _shortened(row.detail, 90)])
    head = ["stages", "ranks each", "weights", "seconds", "counted", "at most", "bound", "waiting", "recomputed", "peak GiB", ""]
    return [
        "STAGES  of the first step; compared by seconds with the gathers of weights that count, at most: with all of them",
        *_table(head, rows),
    ]


def _ablation(forecast: Forecast) -> list[str]:
    if not forecast.ablation:
        return []
    *alone, together = forecast.ablation
    rows = []
    for row in (together, *alone):
        factor = row.step_s / together.step_s if together.is_possible else 0.0
        slower = f"{factor:.2f}x" if row.is_possible and factor else ""
        rows.append((row.name, duration(row.step_s) if row.is_possible else "-", slower, _shortened(row.detail, 90)))
    return [
        "ABLATION  the first step by each system alone, with pipeline stages where it has them, and by all in one plan",
        *_table(("", "seconds", "of all", ""), rows),
    ]


def _choice_row(choice: Choice, ours_s: float) -> tuple[str, ...]:
    if not choice.is_possible:
        return choice.label, "-", "", choice.detail
    factor = choice.counted_s / ours_s
    verdict = f"{factor:.2f}x faster" if factor > 1 else f"{1 / factor:.2f}x slower"
    if abs(factor - 1) < _EQUAL:
        verdict = "equal"
    return choice.label, duration(choice.step_s), verdict, _shortened(choice.layout or choice.detail)


def _reserved(scenario: Scenario) -> list[tuple[str, str, str]]:
    """Makes rows for device bytes outside of plans: communicators, if there are any, and the rest."""
    memory, placement, costs = scenario.memory, scenario.placement, scenario.costs
    kept = memory.device_bytes - memory.usable_bytes
    if costs.cluster.hardware.name == GENERIC_CPU.name or costs.cluster.num_ranks == 1:
        return [("kept for workspace and the process", _gib(kept), "")]
    blocks, num_stages = block_sizes(placement.degrees, costs), max(1, scenario.setup.num_stages)
    ways = placement.shard_ranks, num_stages, False, costs.model.num_head_stages, bool(costs.node_ranks)
    number = num_communicators(costs.cluster.num_ranks, blocks, *ways)
    taken = number * COMMUNICATOR_BYTES
    return [
        ("kept for communicators of NCCL", _gib(taken), f"{number} of {COMMUNICATOR_BYTES / 2**30:g} GiB"),
        ("kept for workspace and the process", _gib(max(0, kept - taken)), ""),
    ]


def _memory(forecast: Forecast) -> list[str]:
    memory, placement = forecast.scenario.memory, forecast.scenario.placement
    states, tokens = memory.state_bytes(*placement.sharing), forecast.peak_tokens
    saved, use = forecast.activation_bytes, forecast.fullest
    source = "measured" if memory.is_measured else "by formula"
    if memory.is_measured:
        held = f"{tokens:,} tokens of {memory.saved_bytes_per_token / 2**20:.2f} MiB"
        peak = ("saved for backward at the peak", _gib(saved), held)
    else:
        how = "everything kept" if use is None or use.keeps_everything else "under policies"
        peak = ("saved for backward and workspace at the peak", _gib(saved), f"up to {tokens:,} tokens, {how}")
    rows = [
        ("weights, gradients, optimizer states", _gib(states), ""),
        peak,
        ("free", _gib(memory.usable_bytes - states - saved), ""),
        *_reserved(forecast.scenario),
        ("device", _gib(memory.device_bytes), ""),
    ]
    ways = [
        (
            room.parameters.replace("_", " ") + (" (chosen)" if room.parameters == placement.parameters else ""),
            _gib(room.state_bytes),
            f"{room.tokens_per_rank:,}" if room.tokens_per_rank else "does not fit",
            # sequences are longer in the slices of a pipeline
            f"{room.longest_tokens:,}" if room.tokens_per_rank and not placement.is_pipeline else "-",
            "",
        )
        for room in rooms(memory, placement)
    ]
    return [
        f"MEMORY  of the fullest rank, {source}",
        *_table(("", "GiB", ""), rows),
        *([f"  states: {words}"] if (words := state_words(memory)) else []),
        *(_use_lines(use) if use else []),
        "",
        *_table(("how they live", "GiB", "tokens per rank", "longest sequence", ""), ways),
    ]


def _use_lines(use: MemoryUse) -> list[str]:
    """Makes lines about a step's treatment of activations, and its reason."""
    counts = [(use.num_kept, "wholly kept"), (use.num_tiled, "kept with the loss in tiles"), (use.num_chosen, "under policies")]
    phrases = [f"{counted(count, 'group')} {how}" for count, how in counts if count]
    if use.num_chosen:
        again = ", ".join(f"{share:.0%} of {name.replace('_', ' ')}" for name, share in use.recomputed if share)
        phrases.append(f"recomputed: {again}" if again else "nothing is recomputed")
        if use.host_bytes:
            phrases.append(f"{_gib(use.host_bytes)} GiB of host memory on the fullest rank")
        if use.num_sliced:
            phrases.append(f"{counted(use.num_sliced, 'group')} in up to {use.most_slices} slices")
        phrases.append(f"{duration(use.added_s)} added to their passes")
    lines = [f"  activations: {'; '.join(phrases)}"]
    return [*lines, f"  {use.reason}"] if use.reason else lines


def _longest(forecast: Forecast) -> list[str]:
    scenario, memory = forecast.scenario, forecast.scenario.memory
    planned, positions = scenario.longest_tokens, scenario.costs.model.max_positions
    packed = scenario.costs.model.packed
    over = "" if packed.is_empty else f" over {packed.words}"
    trained = f"LoRA of rank {memory.lora_rank}{over}" if memory.lora_rank else "all weights trained"
    if memory.is_measured:
        how = "as was measured"
    elif memory.keeps_everything:
        how = "everything kept"
    else:
        kept = min(scenario.kept_tokens, scenario.tokens_per_rank)
        how = f"everything kept up to {kept:,} on a rank, recomputed as needed above"
    ranks = scenario.placement.degrees[-1]
    is_longer = planned > ranks * scenario.tokens_per_rank
    alone = "; more alone, in slices" if is_longer else ""
    lines = [
        f"LONGEST SEQUENCE  {planned:,} tokens ({_ranks(ranks)} of {scenario.tokens_per_rank:,}{alone}), {trained}: {how}",
        f"  {1 - memory.usable_bytes / memory.device_bytes:.0%} of each device is reserved",
        *([] if memory.is_measured else _switches(forecast)),
    ]
    if (holds := scenario.held_tokens) > planned:
        lines.append(f"  the model has {positions:,} positions, which nothing extends; memory alone would hold {holds:,} tokens")
    if planned > positions:
        lines.append(
            f"  the model itself has {positions:,} positions; beyond them its RoPE or position embeddings must be extended"
        )
    rows = [
        (remedy.change, f"{remedy.longest_tokens:,}", f"{remedy.longest_tokens / planned:.1f}x", "")
        for remedy in forecast.remedies
    ]
    return [*lines, *_table(("what would lengthen it", "tokens", "", ""), rows)] if rows else lines


def _switches(forecast: Forecast) -> list[str]:
    """Makes rows for switches of the activation engine that allow longer sequences; some also with attention kept."""
    rows: list[list[str]] = []
    most, gains = -1, True
    for row in forecast.longest:
        cells = [f"{row.tokens:,}", duration(row.step_s) if row.tokens else "-"]
        if not row.switches.startswith(" "):
            gains, most = row.tokens > most, max(row.tokens, most)
            if gains:
                rows.append([row.switches, *cells, "", "", ""])
        elif gains:
            rows[-1][3:5] = cells
    return _table(("what the activation engine does", "tokens", "step", "attention kept", "step", ""), rows)


def execution_text(plan: StepPlan, execution: Execution, costs: CostModel, memory: DeviceMemory) -> str:
    """Writes the report of a simulated step: seconds, shares, and a row per rank; consecutive equal ranks share a row."""
    return as_text([execution_lines(plan, execution, costs, memory)])


def execution_lines(plan: StepPlan, execution: Execution, costs: CostModel, memory: DeviceMemory) -> list[str]:
    """Makes lines and the table of `execution_text`. Seconds have the decimals of the step's."""
    # first and last rank of a row, its most tokens, and its other cells
    folded: list[tuple[int, int, int, tuple[str, ...]]] = []
    peaks, weights = peak_bytes(plan, execution, costs, memory), execution.weights
    for rank, on_device, on_host in zip(execution.ranks, peaks, execution.host_bytes, strict=True):
        seconds = (rank.busy_s, rank.compute_s, rank.exchange_s, rank.idle_s)
        cells = (*(_beside(each, execution.step_s) for each in seconds), _gib(on_device), _gib(on_host))
        first, tokens = rank.rank, rank.peak_tokens
        if folded and folded[-1][3] == cells and abs(folded[-1][2] - tokens) <= _FEW_TOKENS * tokens:
            first, _, most, _ = folded.pop()
            tokens = max(tokens, most)
        folded.append((first, rank.rank, tokens, cells))
    rows = [
        (str(first) if first == last else f"{first} to {last}", *cells[:4], f"{tokens:,}", *cells[4:])
        for first, last, tokens, cells in folded
    ]
    head = ["rank", "busy", "computing", "exchanging", "waiting", "peak tokens", "peak GiB", "host GiB"]
    if not any(execution.host_bytes):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return [
        f"step {plan.step}: {len(plan.lengths):,} sequences, {sum(plan.lengths):,} tokens, {plan.num_ranks} ranks, "
        f"{_micro_batches(plan)} {_shortened(plan.folded_layout)}",
        f"  {duration(execution.step_s + weights.teacher_s)}; "
        f"{_shares(*(execution.share(s) for s in ('compute_s', 'exchange_s', 'idle_s')))}",
        *_teacher_lines(weights, "the seconds of ranks"),
        *_weights_lines(weights, execution.step_bounds_s),
        f"  peak {_gib(max(peaks))} GiB of {_gib(memory.usable_bytes)} GiB usable",
        *_use_lines(memory_use(plan, execution, costs, memory)),
        *_table(head, rows),
    ]


def _beside(seconds: float, whole_s: float) -> str:
    """Formats seconds with the unit and decimals of `duration` for a larger whole."""
    number, _, unit = duration(whole_s).partition(" ")
    if unit not in ("s", "ms"):
        return duration(round(seconds)) if round(seconds) >= 60 else f"{round(seconds)} s"
    return f"{seconds * (1e3 if unit == 'ms' else 1):.{len(number.partition('.')[2])}f} {unit}"


def _ranks(count: int) -> str:
    return f"{count} ranks" if count > 1 else "one rank"


def _micro_batches(plan: StepPlan) -> str:
    return f"{len(plan.micro_batches)} micro-batches" if len(plan.micro_batches) > 1 else "one micro-batch"


def _shares(compute: float, exchange: float, idle: float) -> str:
    return f"rank-seconds: {compute:.0%} computing, {exchange:.0%} communication, {idle:.0%} waiting"


def _teacher_lines(weights: WeightSeconds, without: str) -> list[str]:
    """Makes a line about the forwards of a teacher, if there is one. without: what does not count them."""
    named = f"  {duration(weights.teacher_s)} of it are forwards of the teacher, which {without} leave out"
    return [named] if weights.teacher_s else []


def _weights_lines(weights: WeightSeconds, step_bounds_s: tuple[float, float]) -> list[str]:
    """Makes a line about gathers of weights, sums and the optimizer, which other seconds do not include."""
    from_host = ", with copies of shards from the host," if weights.away_s else ""
    parts = [f"gathers of sharded weights{from_host} take {duration(weights.gather_s)}"] if weights.gather_s else []
    parts += [f"reads of gradients to add them up take {duration(weights.copies_s)}"] if weights.copies_s else []
    parts += [f"sums of gradients over copies take {duration(weights.sum_s)}"] if weights.sum_s else []
    parts += [f"the optimizer takes {duration(weights.update_s)}"] if weights.update_s else []
    parts += [f"shards leave and come back in {duration(weights.away_s)}"] if weights.away_s else []
    if not parts:
        return []
    least, most = (duration(seconds) for seconds in step_bounds_s)
    moved = "gathers" if weights.gather_s else "sums" if weights.sum_s else "copies to the host"
    total = f"{least} to {most}, by how much of the {moved} is hidden" if least != most else most
    return [f"  beside it: {', '.join(parts)}; with them a step takes {total}"]


def _wrapped(words: Sequence[str]) -> list[str]:
    """Makes one line per micro-batch, up to `_MAX_ROWS`."""
    lines = [f"    {word}" for word in words[:_MAX_ROWS]]
    return [*lines, f"    ... {len(words) - _MAX_ROWS} more"] if len(words) > _MAX_ROWS else lines


def _shortened(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 4].rstrip(" ,") + " ..."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [Table.of(head, rows)]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f}"
