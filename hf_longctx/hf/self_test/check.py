"""The parity self-test at start: runs a reduced copy of the user's model under small plans and as plain transformers.

Everything is real except the depth. The copy has the model's own class, config, adapters and weights at full width, with one
layer of every kind (`reduced_copy`). It is placed like the model (replicated, sharded, in stages) and runs through collator,
group pool, executor and activation engine. Its plans (`probe_plans`) use the largest groups that a run's plans may have, in every
shape, and slices if plans may have them. The plain run is the copy's own forward and autograd, one document at a time, as in
transformers.

In fp64 everything must agree to 5e-5 of a norm. Parts that transformers always computes in fp32 (norms, rotary embeddings,
softmax of eager attention) are rounded at 6e-8, and some hundred roundings may differ. If memory is short, the copy is in fp32
and the limit is 2e-3, since two fp32 sums add some thousand terms in different orders, perhaps in TF32. The bugs that the test
should find give larger errors. Autocast, and weights in other precisions (four bits, fp8), are also run unchanged. Then the
yardstick is the distance of the plain model in that precision from the fp64 model, and plans may be four times as far away. The
loss may be right by chance, so its yardstick is that of hidden states.

Rotary embeddings whose frequencies depend on a document's length ("dynamic", "longrope") are set, in the copies, to scale beyond
half of the long document. So documents on both sides of that limit are compared, and slices shorter than the limit.

The loss is the one that the run trains, cross-entropy or the user's `token_loss`. If a user's function around the model's forward
returns a loss, this must be the cross-entropy of its logits or, for labels that are numbers, the squared error or binary
cross-entropy of the task, since plans never read it.

The test compares, each by name: the loss; hidden states after the embedding and after every layer, and their gradients, token by
token, which shows the layer; states of layers without attention at the ends of slices; the gradient of every layer's weights; and
the gradient of a long document's last token at token 0 of the document. That last token must have exactly no gradient at other
documents, nor at tokens that all windows together hide from it. The real model is never run or written to.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.families.registry import MIXERS
from hf_longctx.hf.data.chat import DataError
from hf_longctx.hf.data.fields import MEDIA
from hf_longctx.hf.data.labels import HeadTask
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.document_rope import shorten_limits
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.positions import absent_token_ids
from hf_longctx.hf.models.states import mixers_of
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together
from hf_longctx.hf.ranks.launch import host_bytes
from hf_longctx.hf.rules.arguments import WAY_OUT
from hf_longctx.hf.self_test.independent import functions_added, original_left_alone
from hf_longctx.hf.self_test.parity import EMBEDDING, ENDS, MERGED, TOWERS, Errors, Finding, Limits, findings
from hf_longctx.hf.self_test.probe_images import ProbeImages
from hf_longctx.hf.self_test.probe_plans import LONG, PACKED, ProbePlan, least_lent_tokens, probe_lengths
from hf_longctx.hf.self_test.reduced_copy import ChosenLayers, ReducedCopy, has_user_functions, num_elements, reduced_copy
from hf_longctx.hf.self_test.specimen import CopyRun, HiddenTrace, Rows, RunPlace, Specimen, agreed_errors, differences, largest
from hf_longctx.hf.start.losses import loss_name, token_loss_problems
from hf_longctx.plan.core.types import Span, StepPlan
from hf_longctx.plan.setup import Setup
from hf_longctx.runtime.core.loss import IGNORE_INDEX, AnyLoss, Distillation, SquaredError, TokenLoss, ValueLoss
from hf_longctx.runtime.process_groups import GroupPool

logger = logging.getLogger(__name__)

_EXACT = {torch.float64: 5e-5, torch.float32: 2e-3}
_WORKING_FLOOR, _WORKING_FACTOR = 1e-5, 4.0
# tokens of the long document: the fewest, the fewest per rank of a group, and the most for filling a window; windows that
# need more are shortened
_LEAST_TOKENS, _TOKENS_PER_RANK, _MOST_TOKENS = 64, 6, 256
# bytes per weight: the weight and its gradient, the gradients of both sides in fp64 and, for an fp64 copy, also a copy in the
# run's precision
_BYTES_PER_ELEMENT = {torch.float64: 8 + 8 + 2 * 8 + 4, torch.float32: 4 + 4 + 2 * 8}
# words in class names of routers and experts
_OF_EXPERTS = ("Experts", "Router", "TopK")
_MASKED_SHARE = 0.2
_SITES = {
    EMBEDDING: "the embedding",
    MERGED: "what layers get, embeddings with features of images in place of some,",
    ENDS: "embedding, norm and head",
    TOWERS: "towers and projectors",
}


@dataclass(frozen=True)
class SelfTest:
    """Everything that the test needs from the model before it is cut into stages or placed."""

    # the model itself, which must not run
    original: Any
    # copy of the model in fp64 or fp32
    exact: ReducedCopy
    # copy in the run's own precision, if that differs
    working: ReducedCopy | None
    setup: Setup
    lengths: tuple[int, ...]
    dtype: torch.dtype
    is_autocast: bool
    name: str
    # kind of the model's packed weights, which the exact copy holds unpacked; empty if there are none
    packed: str
    # length of the longest document whose rotary frequencies are not scaled; 0 if they do not depend on length
    rope_limit: int = 0
    # images in its documents; None for rows of text
    images: ProbeImages | None = None

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        setup: Setup,
        device: torch.device,
        is_autocast: bool,
        control: dist.ProcessGroup | None,
        processor: Any = None,
    ) -> SelfTest | None:
        """Copies a model, which will run under plans of `setup`; returns None, and logs why, if the test cannot run.

        The attention of the model is switched already. processor: makes images for the test's documents; None if rows of the
        run have none. Collective over the ranks of `control`.
        """
        model = facts.model
        if facts.loaded_ranges is not None:
            _left_out(
                "every rank loaded its own pipeline stage, so that no rank has the plain model to compare with", model, control
            )
            return None
        boundaries = sorted(layers.first_layer for ranges in setup.ranges for layers in ranges)
        images = None if processor is None else _images(model, processor, control)
        free_bytes = min(gather_objects(_free_bytes(model, device, setup), control))
        for has_towers in (True, False) if images is not None else (False,):
            chosen = ChosenLayers.of(model, boundaries, has_towers)
            elements = num_elements(chosen)
            # a stage is cut from a second copy, which takes memory too
            num_cut = int(setup.num_stages > 1)
            needed = {each: elements * (own + num_cut * each.itemsize) for each, own in _BYTES_PER_ELEMENT.items()}
            dtype = next((each for each in _EXACT if needed[each] <= free_bytes), None)
            if dtype is not None:
                break
            if has_towers:
                images = None
                _warn(control, "self-test without images: there is no memory for a copy of the towers")
        if dtype is None:
            _left_out(
                f"a copy of a layer of every kind takes {needed[torch.float32] / 2**30:.1f} GiB with its gradients, but only "
                f"{free_bytes / 2**30:.1f} GiB are free",
                model,
                control,
            )
            return None
        most = setup.costs.model.max_positions
        degree = max(setup.planner.degrees)
        long_tokens = max(_LEAST_TOKENS, _TOKENS_PER_RANK * degree)
        if setup.planner.lend_stages:
            long_tokens = max(long_tokens, least_lent_tokens(setup.num_stages, degree))
        long_tokens = min(most, long_tokens)
        longest_window = min(most, max(long_tokens, _MOST_TOKENS)) * 2 // 3
        exact = reduced_copy(chosen, longest_window, dtype)
        # make the document so long that windows and indexes hide tokens from its last third
        long_tokens = max(long_tokens, max((exact.most_chosen, *exact.windows.values())) * 3 // 2)
        packed = "four-bit" if facts.has_four_bits else "fp8" if facts.has_fp8 else ""
        is_rounded = is_autocast or bool(packed) or model.dtype != dtype
        is_working = dtype == torch.float64 and is_rounded and not _has_routers(exact.model)
        working = reduced_copy(chosen, longest_window, None) if is_working else None
        lengths = probe_lengths(min(most, long_tokens))
        lengths = lengths if images is None else images.longer(lengths)
        # half of the long document is longer than its slices, and longer than the other documents
        limits = [shorten_limits(each.model, lengths[LONG] // 2) for each in (exact, working) if each is not None]
        return cls(model, exact, working, setup, lengths, dtype, is_autocast, facts.name, packed, max(limits), images)

    def run(self, place: RunPlace, forward: str = "") -> str:
        """Compares plans with the plain model, frees the copies and returns a line for the log.

        forward: name of a user's function around the model's forward, whose loss plans never read. Raises ValueError on every
        rank if a plan fails, or if that loss differs. Collective over all ranks of the pool.
        """
        start_s = time.monotonic()
        device, loss = place.device, ""
        if place.token_loss is not None:
            # the copy has fewer token ids, which a loss with one weight per id does not support
            own: Any
            num_classes = place.task.num_labels or self.exact.num_token_ids
            fits = not token_loss_problems(place.token_loss, num_classes, device)
            own = place.token_loss.loss if isinstance(place.token_loss, _TaughtByLabels) else place.token_loss
            own = SquaredError.name if own is _distance else loss_name(own)
            loss = own if fits else "cross-entropy, since token_loss needs all token ids"
            loss = f"loss of a token: {loss}, "
            place = place if fits else replace(place, token_loss=None)
        try:
            with original_left_alone(self.original), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                bad, worst, probes = self._compare(place, forward)
        finally:
            for each in (self.exact, self.working):
                if each is not None:
                    each.give_up()
            # models and hooks refer to each other, so only the collector frees them
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if bad:
            raise ValueError(self._refusal(bad, probes))
        return self._line(probes, worst, time.monotonic() - start_s, loss)

    def _compare(self, place: RunPlace, forward: str) -> tuple[dict[str, list[Finding]], float, tuple[ProbePlan, ...]]:
        """Returns the findings for each plan that fails, the largest error of the exact copy, and all plans."""
        exact, pool, images = Specimen(self.exact, False, self.setup, place, self.images), place.pool, self.images
        absent = absent_token_ids(base_of(self.exact.model))
        rows = _rows(self.lengths, self.exact.num_token_ids, absent, place.task)
        if images is not None:
            rows = images.put_into(rows, self.exact.model)
        probes = exact.probes(self.lengths)
        # positions at which slices leave their states
        spans = {(span.sequence, span.start) for probe in probes for span in _spans(probe.plan) if span.start}
        # the plain model runs whole images alone
        spans = {(number, start) for number, start in spans if not _is_inside(start, rows[number])}
        cuts = spans if any(MIXERS[type(each).__name__].fills_cache for each in mixers_of(self.exact.model).values()) else ()
        plain = exact.plain(rows, cuts=cuts)
        floor = _EXACT[self.dtype]
        if forward:
            self._check_own_loss(exact, rows[LONG], forward)
        bad, worst = self._judge(exact, probes, rows, plain, Limits(floor), pool)
        if self.working is not None and not bad:
            working = Specimen(self.working, self.is_autocast, self.setup, place, images)
            # yardstick: distance of the plain model in the run's precision from fp64
            yardstick = agreed_errors(differences(working.plain(rows, cuts=cuts), plain, self.exact.windows), pool.control)
            # a loss may be right by chance
            yardstick["loss", 0] = max(error for (kind, _), error in yardstick.items() if kind in ("loss", "values"))
            limits = Limits(_WORKING_FLOOR, _WORKING_FACTOR, yardstick)
            bad, _ = self._judge(working, probes, rows, plain, limits, pool, has_probes=False)
        return bad, worst, probes

    def _check_own_loss(self, exact: Specimen, row: Mapping[str, Any], forward: str) -> None:
        """Raises ValueError on every rank if a user's forward returns another loss than plans train by default."""
        problems, found, value_loss = [], exact.own_loss(row), exact.place.value_loss
        name = loss_name(value_loss)
        # token_loss gets classes
        remedy = f"{WAY_OUT}, or let it" if value_loss is None else "let it"
        # losses of transformers are computed in fp32
        if found is not None and not math.isclose(*found, rel_tol=_EXACT[self.dtype]):
            problems.append(
                f"the model's forward was replaced or hooked by {forward} and returns a loss of {found[0]:.6g} for a document "
                f"whose mean {name} is {found[1]:.6g}, but plans train the {name} of its logits and never read a loss that it "
                f"returns; {remedy} return the logits alone"
            )
        raise_together(problems, exact.pool.control)

    def _judge(
        self,
        specimen: Specimen,
        probes: Sequence[ProbePlan],
        rows: Rows,
        plain: CopyRun,
        limits: Limits,
        pool: GroupPool,
        has_probes: bool = True,
    ) -> tuple[dict[str, list[Finding]], float]:
        """Returns findings by name of each failing plan, and the largest error of all plans; equal on every rank."""
        bad: dict[str, list[Finding]] = {}
        worst = 0.0
        last = _only_last(rows, LONG)
        # keep only the hidden trace, and free the gradients at once
        alone = specimen.plain(last, (LONG,)).trace if has_probes else None
        for probe in probes:
            with pool.small_parts() if probe.in_parts else nullcontext():
                measured = differences(specimen.planned(probe.plan, rows), plain, self.exact.windows)
                if alone is not None:
                    # run only the first micro-batch, which has the group
                    packed = replace(probe.plan, micro_batches=probe.plan.micro_batches[:1])
                    measured.errors.update(self._sight(specimen.planned(packed, last).trace, alone))
            errors = agreed_errors(measured, pool.control)
            worst = max([worst, *errors.values()])
            if found := findings(errors, limits, self._site, self.exact.windows):
                bad[probe.name] = found
        return bad, worst

    def _sight(self, found: HiddenTrace, plain: HiddenTrace) -> Errors:
        """Measures which tokens the long document's last token sees, by the gradient of its loss at them."""
        first = plain.whole("gradients", EMBEDDING, LONG)
        if first is None:
            raise ValueError(
                f"the self-test runs a copy of the model, but the copy's forward did not run the copy's embedding; "
                f"{functions_added(self.original)}"
            )
        others = [number for number in PACKED if number != LONG]
        errors: Errors = {("documents", 0): largest(found, "gradients", EMBEDDING, others)}
        scale = float(first[0].norm())
        for (sequence, start, _), tensor in found.records.get(("gradients", EMBEDDING), {}).items():
            if sequence == LONG and start == 0:
                gap = float((tensor[0] - first[0]).norm())
                errors["token 0", 0] = gap / scale if scale else gap
        windows = list(self.exact.windows.values())
        if all(windows):
            # the token before the last one predicts the last label
            unseen = max(0, self.lengths[LONG] - 2 - sum(window - 1 for window in windows))
            errors["window", 0] = largest(found, "gradients", EMBEDDING, (LONG,), unseen)
        return errors

    def _site(self, site: int) -> str:
        if site in _SITES:
            return _SITES[site]
        return f"layer {site} ({self.exact.patterns[site]})"

    def _refusal(self, bad: dict[str, list[Finding]], probes: Sequence[ProbePlan]) -> str:
        lines = [f"- {name}: {each.check}: {each.text}" for name, found in bad.items() for each in found]
        good = [probe.name for probe in probes if probe.name not in bad]
        remedy = (
            f"plans that passed ({'; '.join(good)}) may be used alone: set `method`, `degrees`, exchange_parts=1, "
            f"activations='keep' or lend_stages=False so"
            if good
            else "none of the plans passed"
        )
        return (
            f"the parity self-test failed before step 1: under plans {self.name} does not compute what it computes in plain "
            f"transformers (every line begins with the plan; documents have {_listed(self.lengths)} tokens):\n"
            + "\n".join(lines)
            + f"\n{remedy}; please report this message. self_test=False trains without the check, on gradients that are wrong"
        )

    def _line(self, probes: Sequence[ProbePlan], worst: float, seconds: float, loss: str) -> str:
        layers = ", ".join(f"{number} ({pattern})" for number, pattern in self.exact.patterns.items())
        layers = f"{layers} of {self.exact.whole_layers}"
        shortened = ", windows shortened so that documents fill them" if self.exact.was_shortened else ""
        whole = "" if self.exact.is_cut else " (all layers, since the model cannot be cut)"
        if self.rope_limit:
            shortened += f", rotary frequencies already scaled beyond {self.rope_limit} tokens"
        precision = str(self.dtype).removeprefix("torch.") + (f" with {self.packed} weights unpacked" if self.packed else "")
        images = "" if self.images is None else f" with {self.images.words()}"
        precision += "" if self.working is None else " and the run's precision"
        return (
            f"self-test passed in {seconds:.1f} s: largest error {worst:.1e} against the plain model\n"
            f"  plans ({'; '.join(probe.name for probe in probes)}), layers {layers}{whole}{shortened}, "
            f"{loss}{sum(self.lengths)} tokens{images} in {precision}"
        )


def _images(model: Any, processor: Any, control: dist.ProcessGroup | None) -> ProbeImages | None:
    """Returns images for documents; None, and logs why, if the processor reads none of the sizes that are tried."""
    try:
        return ProbeImages.of(model, processor)
    except DataError as error:
        _warn(control, f"self-test without images: {error}")
        return None


def _is_inside(place: int, row: Mapping[str, Any]) -> bool:
    """Whether a row has an image that begins before a token and ends after it."""
    return any(each["start"] < place < each["stop"] for each in row.get(MEDIA, ()))


def _spans(plan: StepPlan) -> Iterator[Span]:
    for group in (group for micro_batch in plan.micro_batches for group in micro_batch.groups):
        for chunk in group.chunks:
            yield from chunk.spans


def probed(token_loss: AnyLoss, task: HeadTask) -> tuple[TokenLoss | None, HeadTask, ValueLoss | None]:
    """Returns loss and labels of the test's rows, always classes, for a run with this loss and these labels.

    Third, the run's own loss if its labels are numbers, for comparison with the loss of a user's forward. A `Distillation` has a
    made-up teacher, whose logits depend on labels alone, since the run's own teacher has a test of its own.
    """
    if isinstance(token_loss, Distillation):
        return _TaughtByLabels(token_loss), task, None
    task = replace(task, problem="single_label_classification") if task.has_values else task
    return (_distance, task, token_loss) if isinstance(token_loss, ValueLoss) else (token_loss, task, None)


@dataclass(frozen=True)
class _TaughtByLabels:
    """A `TokenLoss` beside a teacher whose logits are sines, with frequencies that labels give."""

    loss: Distillation

    def __call__(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        ids_V = torch.arange(logits_TV.shape[1], dtype=logits_TV.dtype, device=logits_TV.device)
        return self.loss.losses(logits_TV, 3 * torch.sin(ids_V * (1 + labels_T.clamp_min(0)).unsqueeze(1)), labels_T)


def _distance(logits_TK: Tensor, labels_T: Tensor) -> Tensor:
    """Returns losses [T]: squared error with the number of the class as the value."""
    return SquaredError().losses(logits_TK, labels_T.unsqueeze(1).to(logits_TK.dtype))


def _rows(lengths: Sequence[int], num_token_ids: int, absent: Collection[int], task: HeadTask) -> Rows:
    """Makes documents of random tokens, equal on every rank; some have no label, so that ranks have different label counts.

    absent: token ids that no row may have. task: the labels of the rows.
    """
    generator = random.Random(0)
    known = [token for token in range(num_token_ids) if token not in absent]
    rows = []
    for length in lengths:
        ids = [generator.choice(known) for _ in range(length)]
        if task.kind == "document":
            # the last token is the one that the head reads
            ids[-1] = next(token for token in (ids[-1], *known) if token != task.pad_token_id)
            rows.append({"input_ids": ids, "labels": [generator.randrange(task.num_labels)]})
            continue
        if task.kind == "token":
            classes = [IGNORE_INDEX if generator.random() < _MASKED_SHARE else token % task.num_labels for token in ids]
            rows.append({"input_ids": ids, "labels": [*classes[:-1], ids[-1] % task.num_labels]})
            continue
        labels = [IGNORE_INDEX if generator.random() < _MASKED_SHARE else token for token in ids]
        rows.append({"input_ids": ids, "labels": [*labels[:-1], ids[-1]]})
    return rows


def _only_last(rows: Rows, document: int) -> Rows:
    """Returns the rows with a single label, on the last token of `document`."""
    return [
        {**row, "labels": [IGNORE_INDEX] * (len(row["labels"]) - 1) + [row["labels"][-1] if number == document else IGNORE_INDEX]}
        for number, row in enumerate(rows)
    ]


def _free_bytes(model: Any, device: torch.device, setup: Setup) -> int:
    """Returns the bytes that are free for the copies on this rank."""
    free = host_bytes()[0] // setup.costs.cluster.ranks_per_node
    if device.type != "cuda":
        return free
    on_device = int(torch.cuda.mem_get_info(device)[0])
    if model.device.type != "cuda" and setup.costs.parameters == "replicated":
        on_device -= sum(p.nbytes for p in model.parameters())
    return min(free, on_device)


def _has_routers(model: Any) -> bool:
    """Whether the model has routers; rounding may then send a token to other experts, so that no yardstick applies."""
    return any(word in type(module).__name__ for module in model.modules() for word in _OF_EXPERTS)


def _left_out(why: str, model: Any, control: dist.ProcessGroup | None) -> None:
    """Logs that the test cannot run; raises ValueError on every rank if a hook or a replaced forward needs the test."""
    problem = (
        f"the model has forward or backward hooks, or a module whose forward was replaced, which only the self-test checks, and "
        f"it cannot run: {why}; remove the hooks and forwards, or set self_test=False if none of them mixes tokens"
    )
    raise_together([problem] if has_user_functions(model) else [], control)
    _warn(control, f"self-test left out: {why}")


def _warn(control: dist.ProcessGroup | None, text: str) -> None:
    """Logs a warning on the first rank."""
    if control is None or dist.get_rank() == 0:
        logger.warning("%s", text)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
