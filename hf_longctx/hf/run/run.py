"""Starts a run, for `LongContextTrainer` and the callback alike: builds everything that plans need.

The start has seven phases, each a function: ranks *meet*, *read* which labels the model learns, *check* settings and rows, *set
up* costs and limits, *take* the model (patch it, cut it, make process groups and engines), *try* plans in the self-test, and
*teach*, which tests and places a teacher if there is one. Changes that a phase has made to model and ranks are undone in reverse
if it, or a later one, fails; a teacher stays frozen and where it was placed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_longctx.hf.checkpoints.room import folder_problems, memory_problems
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.labels import HeadTask, task_of
from hf_longctx.hf.data.resume import DataRecorder
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.models.activations import ActivationRuntime
from hf_longctx.hf.models.adapters import hidden_dtype
from hf_longctx.hf.models.attention import attention_line, attention_name, num_attention_layers
from hf_longctx.hf.models.cutting import (
    cut_model,
    drop_head,
    find_pieces,
    loaded_ranges,
    stage_model,
    stages_of_heads,
    stages_that_lend,
)
from hf_longctx.hf.models.dropout import key_noise, rest_noise
from hf_longctx.hf.models.experts import RouterRuntime
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.kernels import FusedLayers, fused_layers
from hf_longctx.hf.models.layers import output_head
from hf_longctx.hf.models.logits import logit_change
from hf_longctx.hf.models.patch import patch_model, restore_attention
from hf_longctx.hf.models.quantised import fp8_layers, keep_blocks, round_frozen
from hf_longctx.hf.models.refusing import allow_all, held_stage, refuse_all, refuse_saving, refuses
from hf_longctx.hf.models.spec import states_of
from hf_longctx.hf.models.states import scan_kernels
from hf_longctx.hf.models.whole_again import WholeModel
from hf_longctx.hf.planning.report import RunReport
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import (
    LONGEST_S,
    START,
    begin_beats,
    control_group,
    count_over_ranks,
    joint_call,
    raise_together,
)
from hf_longctx.hf.ranks.heartbeats import follow_launcher
from hf_longctx.hf.rules.arguments import WAY_OUT
from hf_longctx.hf.rules.collators import Collation
from hf_longctx.hf.rules.hooks import hook_problems
from hf_longctx.hf.rules.media import may_have_media
from hf_longctx.hf.rules.models import align_padding, classifier_problems
from hf_longctx.hf.rules.rule import Facts, refusals
from hf_longctx.hf.rules.teacher import TAUGHT_ROWS, teacher_digest, teacher_problems
from hf_longctx.hf.run.placement import (
    Placement,
    ReplicatedPlacement,
    ShardedPlacement,
    Shards,
    StagedPlacement,
    check_trained,
)
from hf_longctx.hf.run.sets import SequenceSets
from hf_longctx.hf.self_test.added_later import CodeAtStart
from hf_longctx.hf.self_test.check import SelfTest, probed
from hf_longctx.hf.self_test.reduced_copy import user_forward
from hf_longctx.hf.self_test.rounded import find_rounded
from hf_longctx.hf.self_test.specimen import RunPlace
from hf_longctx.hf.start.losses import chosen_loss, loss_digest, loss_name, loss_problems, stock_loss_problems
from hf_longctx.hf.start.setup import OtherResidents, TrainingRows, checked_degrees, choose_setup, open_plan_source, opening_line
from hf_longctx.hf.start.sharded_loading import unread_problems
from hf_longctx.hf.start.stages import own_stage
from hf_longctx.plan.core.types import Ranges, StepPlan
from hf_longctx.plan.setup import Setup
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.core.dropout import DropoutKeys, keys_of
from hf_longctx.runtime.core.loss import AnyLoss, LabelSmoothing, TokenLoss, ValueLoss
from hf_longctx.runtime.execution.executor import StepExecutor, Teacher
from hf_longctx.runtime.execution.stage_model import StageModel, whole_model
from hf_longctx.runtime.parameters.master_weights import copied_dtypes
from hf_longctx.runtime.parameters.rounded import note_rounded, noted_rounded
from hf_longctx.runtime.parameters.sharded import shard_mesh
from hf_longctx.runtime.process_groups import GroupPool, with_head

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mode:
    """Names what plans decide in a run; the loop of a stock trainer decides the rest."""

    # the parts of a step; else a plan has one micro-batch, of the sequences that a stock loader drew for one forward
    steps: bool
    # the loss of a token, and the noise of embeddings (NEFTune); else the model's own forward computes its loss
    loss: bool
    # where the optimizer keeps its states; else they lie beside the weights, where plans must count them
    states: bool


# a trainer with plans, or one to which the callback is attached
OWN = Mode(steps=True, loss=True, states=True)
# a stock trainer with the callback alone
BORROWED = Mode(steps=False, loss=False, states=False)


@dataclass(frozen=True)
class RunRequest:
    """Inputs from which a run is started."""

    config: LongContextConfig
    facts: ModelFacts
    args: TrainingArguments
    processing_class: Any
    # problems that were found before, in the arguments
    problems: list[str]
    # the sets that are read under plans, by name; none with `BORROWED`, since a stock loader reads them
    datasets: Mapping[str, Any] = field(default_factory=dict)
    # the process group that `meet` returned, if it was called before
    control: dist.ProcessGroup | None = None
    # the user's loss of a token
    token_loss: TokenLoss | None = None
    # the reference model of a loss of log-probabilities, which is whole; see `reference_run`
    reference: nn.Module | None = None
    # whether a model that is cut into stages must become whole again
    gives_back: bool = False
    # the rows as the user's collator makes them
    collation: Collation = field(default_factory=lambda: Collation(None))
    mode: Mode = OWN
    # the class of the trainer whose loop drives the run
    trainer: type = Trainer
    # stages are "auto" although the user left them open, so that they must hold each row that one stage holds
    has_open_stages: bool = False
    # the model whose distribution the trained one learns; see `_teach`
    teacher: ModelFacts | None = None
    # the user's function that makes a model for every training
    model_init: Any = None

    @property
    def problems_of_saving(self) -> list[str]:
        """Problems with the room that checkpoints take on the disk, and in host memory if they are written behind training."""
        config = self.config
        copied = copied_dtypes(config.fp32_master_weights, config.optimizer_states == "host") if self.mode.states else ()
        to_save = self.args, self.facts.model, copied
        return folder_problems(*to_save) + (memory_problems(*to_save) if config.async_save and self.mode.states else [])

    @property
    def problems_of_rows(self) -> list[str]:
        """Problems with what the user's collator makes of the rows of each set."""
        return [each for name, dataset in self.datasets.items() for each in self.collation.problems(dataset, name)]

    def problems_of_loss(self, task: HeadTask) -> list[str]:
        """Problems with the loss, and with settings that the head's labels leave without effect."""
        if not self.mode.loss:
            return stock_loss_problems(self.facts, self.args, self.config)
        given = {"datasets": self.datasets, "token_loss": self.token_loss}
        of_classifier = classifier_problems(Facts(config=self.config, args=self.args, task=task, given=given))
        return of_classifier or loss_problems(self.facts, self.args, self.token_loss)

    def problems_of_teacher(self, degrees: tuple[int, ...]) -> list[str]:
        """Problems with the teacher, or with settings that need one. degrees: those that groups may have."""
        return teacher_problems(
            Facts(
                config=self.config,
                args=self.args,
                model=self.facts.model,
                known=self.facts,
                trainer=self.trainer,
                given={"token_loss": self.token_loss, "model_init": self.model_init, "taught_by": self.teacher},
                processing_class=self.processing_class,
                num_ranks=self.args.world_size,
                degrees=degrees,
            )
        )


@dataclass(frozen=True)
class _Checked:
    """Holds the findings of the first three phases."""

    request: RunRequest
    control: dist.ProcessGroup | None
    # the labels that the head learns
    task: HeadTask
    degrees: tuple[int, ...]
    token_loss: AnyLoss
    # name of a user's function around the model's forward that may return a loss, which plans never read; empty if there is none
    forward: str

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model."""
        return self.request.facts


@dataclass(frozen=True)
class _Basis:
    """The basis of plans."""

    setup: Setup
    sets: SequenceSets
    fused: FusedLayers
    # names the kernels of layers; empty if there are none
    kernels_line: str


@dataclass(frozen=True)
class Run:
    """Connects a model and its plans, from the start of a run to its end."""

    config: LongContextConfig
    args: TrainingArguments
    setup: Setup
    # the process group for messages between all ranks
    control: dist.ProcessGroup | None
    # the sets that are read under plans; empty if a stock loader reads them
    sets: SequenceSets
    placement: Placement
    # this rank's stage of the model; without a pipeline, the whole model
    stage: StageModel
    source: PlanSource
    activations: ActivationRuntime
    routers: RouterRuntime
    recorder: DataRecorder
    report: RunReport
    undo: ExitStack
    # kernels of layers, bound while an executor is in use
    fused: FusedLayers
    # the user's code on the model at the start
    code: CodeAtStart
    # every stage if stages lend their ranks, since each rank then has the whole model
    all_stages: tuple[StageModel, ...] = ()
    # the loss of a token; None for cross-entropy
    token_loss: AnyLoss = None
    # runs the forwards of a teacher; None without one
    teacher: Teacher | None = None
    # keys of the model's dropout modules; None if it has none
    dropout: DropoutKeys | None = None
    # alpha of the noise that the embedding adds in training (NEFTune); None without noise
    noise_alpha: float | None = None
    # the model before it was cut into stages, if it must become whole again
    whole: WholeModel | None = None
    # runs the self-test again on a model after `release_model`; None if it did not run at the start, or cannot run again, since
    # the model is in stages or shards, or has states or indexes
    retest: Callable[[], str] | None = None

    @property
    def task(self) -> HeadTask:
        """The labels that the model's head learns."""
        return self.sets.task

    @property
    def pool(self) -> GroupPool:
        """The process groups of the run."""
        return self.source.pool

    def executor(self, model: nn.Module, fp32_gradients: bool = True) -> StepExecutor:
        """Makes an executor for the placed model; it owns gradient buffers."""
        stage = replace(self.stage, model=model)
        all_stages = [replace(each, model=model) for each in self.all_stages]
        self.fused.bind(model)
        routers, device = self.routers.balance(model), self.args.device
        executor = StepExecutor(stage, self.pool, device, fp32_gradients, all_stages, routers, self.token_loss)
        executor.added_code = partial(self._added_code, model)
        executor.teacher = self.teacher
        return executor

    def _added_code(self, model: nn.Module) -> str:
        """Describes code that was put on the model, or on its teacher, since the start; empty if there is none."""
        problem = self.code.problem(model)
        if problem or self.teacher is None:
            return problem
        of_teacher = self.teacher.executor.added_code()
        return f"the teacher: {of_teacher}" if of_teacher else ""

    def make_room(self, plan: StepPlan) -> None:
        """Gets the host memory that the plan needs, on all ranks before its first collective, and logs how long that took."""
        if line := self.activations.reserve(plan.estimate.host_bytes):
            self.report.say(line)

    def release_model(self) -> None:
        """Restores the model's own layers and routers, until the next plan binds ours again. Idempotent."""
        self.activations.close()
        self.fused.close()
        self.routers.close()
        if self.dropout is not None:
            self.dropout.rest()

    def close(self) -> None:
        """Closes the process groups, and restores the model's own layers, routers and attention. Idempotent."""
        self.undo.close()


def meet(config: LongContextConfig, args: TrainingArguments | None, problems: Sequence[str] = ()) -> dist.ProcessGroup | None:
    """Waits for all ranks; returns a new process group over which they agree on things.

    problems: what the caller found before. Raises ValueError on every rank for these, and for a setting that was changed to
    something that is not allowed.
    """
    follow_launcher()
    broken = _changed_settings(config)
    timeout_s = (LongContextConfig() if broken else config).collective_timeout_s
    # anything but a number is refused once all ranks have met
    longest_s = float(args.ddp_timeout) if args is not None and isinstance(args.ddp_timeout, Real) else LONGEST_S
    begin_beats(timeout_s, longest_s)
    with joint_call(START, timeout_s):
        # only the default group has a time-out before the first meeting
        PartialState().wait_for_everyone()
        control = control_group(timeout_s, longest_s)
        raise_together([*broken, *problems], control)
    return control


def start_run(request: RunRequest) -> Run:
    """Starts a run in seven phases. Needs no `Trainer` object. Collective over all ranks.

    Raises ValueError on every rank, listing all problems. Model and process groups are then as they were, except for the control
    group, from which slower ranks may still read the problems.
    """
    # ranks that have met need not meet again
    control = request.control if request.control is not None else meet(request.config, request.args)
    if not request.mode.states:
        request = replace(request, config=replace(request.config, optimizer_states="device"))
    with joint_call(START, request.config.collective_timeout_s), ExitStack() as failed, ExitStack() as undo:
        task = _read(request, failed)
        checked = _check(request, control, task)
        checked = _pack(checked)
        basis = _set_up(checked, failed)
        run, test, mesh = _take(checked, basis, undo)
        run = _try(checked, run, test, mesh)
        run = _teach(checked, run, mesh)
        failed.pop_all()
        return replace(run, undo=undo.pop_all())


def _read(request: RunRequest, failed: ExitStack) -> HeadTask:
    """Reads which labels the model's head learns. Lets a model that was loaded as one stage run.

    failed: functions that undo this phase if a later one fails.
    """
    facts = request.facts
    if (ranges := facts.loaded_ranges) is not None:
        failed.callback(refuse_all, facts.model, own_stage(len(ranges)), len(ranges))
        allow_all(facts.model)
    failed.callback(align_padding(facts.head_kind, facts.base, request.processing_class))
    given = (each for each in request.datasets.values() if each is not None)
    return task_of(facts, next((each for each in given if not is_stream(each)), None))


def _check(request: RunRequest, control: dist.ProcessGroup | None, task: HeadTask) -> _Checked:
    """Raises ValueError on every rank, listing all problems, if the run cannot start. Collective, in one exchange."""
    args, mode, facts = request.args, request.mode, request.facts
    problems = request.problems + hook_problems(request.trainer) + request.problems_of_saving
    problems += request.problems_of_loss(task) + _lone_stage_problems(facts) + request.problems_of_rows
    alike = {"token_loss": loss_digest(request.token_loss, facts.num_outputs, args.device)} if mode.loss else {}
    alike |= {} if request.teacher is None else {"teacher": teacher_digest(request.teacher)}
    given = request.config, facts, args, request.processing_class, problems, control, alike
    degrees = checked_degrees(*given, other_problems=request.problems_of_teacher)
    taught_by = None if request.teacher is None else request.config
    token_loss = chosen_loss(args, request.token_loss, task, taught_by) if mode.loss else None
    # with a loss of the user's own, a run leaves out the forward's on purpose; that of a task with values is none
    forward = user_forward(facts.model) if token_loss is None or isinstance(token_loss, ValueLoss) else ""
    return _Checked(request, control, task, degrees, token_loss, forward)


def _pack(checked: _Checked) -> _Checked:
    """Rounds frozen weights to fp8 if settings ask for that; the model stays rounded, also if a later phase fails."""
    request, model = checked.request, checked.facts.model
    keep_blocks(model)
    if request.config.frozen_weights == "fp8":
        round_frozen(model)
    facts = replace(checked.facts, has_fp8=bool(fp8_layers(model)))
    return replace(checked, request=replace(request, facts=facts))


def _set_up(checked: _Checked, failed: ExitStack) -> _Basis:
    """Decides kernels, costs, limits and stages, and checks the sets by them. Collective.

    failed: functions that undo this phase if a later one fails.
    """
    request, control, model = checked.request, checked.control, checked.facts.model
    config, args = request.config, request.args
    failed.callback(note_rounded, model, noted_rounded(model))
    _note_rounded(config, model, args, control)
    # the loop of a stock trainer runs the model's own code
    compiles = config.compile_layers if request.mode.steps else False
    fused, kernels_line = fused_layers(model, args, compiles, control)
    reference = request.reference.parameters() if request.reference is not None else ()
    dtype = torch.bfloat16 if args.bf16 else hidden_dtype(model)
    kernels = _covered(fused, model) | scan_kernels(checked.facts.base, states_of(model.config), args.device, dtype)
    teacher = None if request.teacher is None else request.teacher.model
    beside = OtherResidents(sum(weight.nbytes for weight in reference), kernels, teacher)
    has_choice = request.has_open_stages or config.parameters == "auto"
    must_fit = has_choice and config.long_sequences == "error"
    dataset = request.datasets.get("train_dataset")
    has_towers = may_have_media(dataset, model, request.processing_class)
    rows = TrainingRows(request.collation.rows(dataset), checked.task, must_fit, has_towers)
    setup = choose_setup(config, checked.facts, args, checked.degrees, control, rows, beside)
    raise_together(unread_problems(model, setup), control)
    if args.process_index == 0 and (line := attention_line(model)):
        logger.warning("%s", line)
    if not request.mode.steps:
        setup = setup.in_one_micro_batch()
    sets = SequenceSets(config, args, setup, control, checked.task, request.collation, request.processing_class)
    if request.mode.steps:
        sets.check(checked.facts, request.datasets)
        if request.teacher is not None:
            raise_together(refusals(TAUGHT_ROWS, Facts(given={"has_images": sets.reads_media})), control)
    return _Basis(setup, sets, fused, kernels_line)


def _covered(fused: FusedLayers, model: PreTrainedModel) -> dict[str, bool]:
    """Returns what kernels cover in `model` while its attention runs under plans, which may put forwards of its own in place."""
    name = attention_name(model)
    patch_model(model)
    try:
        return fused.covered(model)
    finally:
        restore_attention(model, name)


def _take(checked: _Checked, basis: _Basis, undo: ExitStack) -> tuple[Run, SelfTest | None, DeviceMesh | None]:
    """Patches the model and cuts it into stages, and makes process groups and engines. Collective.

    Returns the run, the self-test, which has copied the model before it was cut, and the mesh over which parameters are sharded.
    undo: functions that undo this phase, also at the end of the run.
    """
    request, control, facts, setup = checked.request, checked.control, checked.facts, basis.setup
    config, args, model, token_loss = request.config, request.args, facts.model, checked.token_loss
    undo.callback(restore_attention, model, attention_name(model))
    patch_model(model)
    noise_alpha = args.neftune_noise_alpha if request.mode.loss else None
    if noise_alpha is not None:
        key_noise(model, noise_alpha)
        undo.callback(rest_noise, model)
    whole = None
    if request.gives_back and setup.num_stages > 1:
        # earlier changes are undone once the model is whole again
        whole = WholeModel(model, is_loaded=facts.loaded_ranges is not None)
        undo.callback(whole.close, own_stage(setup.num_stages), setup.num_stages)
    if (dropout := keys_of(model)) is not None:
        dropout.seed = args.seed
    undo.callback(basis.fused.close)
    processor = request.processing_class if basis.sets.reads_media else None
    test = SelfTest.of(facts, setup, args.device, args.bf16, control, processor) if config.self_test else None
    is_models_loss = request.mode.loss and (token_loss is None or isinstance(token_loss, LabelSmoothing | ValueLoss))
    code = CodeAtStart(facts, config.self_test, args.device if is_models_loss else None)
    if test is None or not request.mode.loss:
        _warn_of_forward(checked.forward, args, token_loss)
    all_stages = stages_that_lend(model, setup.ranges) if setup.planner.lend_stages else ()
    heads = stages_of_heads(setup.planner.output_shares)
    stage = all_stages[own_stage(setup.num_stages)] if all_stages else _own_stage(setup.ranges, model, heads)
    code.forget_others(model)
    if setup.num_stages > 1 and not all_stages:
        check_trained(stage, control)
    # every rank makes the process groups of shards before those of sequence groups
    mesh = _new_mesh(config, setup, args)
    source = open_plan_source(config, setup, control, args)
    undo.callback(source.pool.close)
    budget, has_head = setup.planner.activations, stage.stage in with_head(setup.num_stages, heads)
    host_bytes = budget.host_bytes if budget is not None else 0
    own_layers = setup.ranges[stage.stage][0] if all_stages else None
    replays_experts = budget is not None and config.expert_ranks is not None
    activations = ActivationRuntime(args.device, host_bytes, source.set_copy_rate, has_head, own_layers, replays_experts)
    routers = RouterRuntime(args.device)
    undo.callback(activations.close)
    undo.callback(routers.close)
    lends = ReplicatedPlacement(control, setup.num_stages) if all_stages else None
    run = Run(
        config=config,
        args=args,
        setup=setup,
        control=control,
        sets=basis.sets,
        placement=lends or _placement(config, setup, args, stage, mesh, source.pool, gathers_towers=basis.sets.reads_media),
        stage=stage,
        source=source,
        activations=activations,
        routers=routers,
        recorder=DataRecorder(),
        report=RunReport(config, source, _opening(checked, basis, source)),
        undo=undo,
        fused=basis.fused,
        all_stages=all_stages,
        token_loss=token_loss,
        dropout=dropout,
        noise_alpha=noise_alpha,
        code=code,
        whole=whole,
    )
    return run, test, mesh


def _opening(checked: _Checked, basis: _Basis, source: PlanSource) -> str:
    """The text that a run prints once, before anything has run."""
    lines = [opening_line(basis.setup, checked.request.args, checked.facts), basis.kernels_line]
    if not source.is_timed:
        lines.append(
            "full_determinism: plans follow the costs known at the start and no measured seconds, so that equal "
            "runs get equal bits (`hardware` gives measured costs)"
        )
    if checked.token_loss is not None:
        lines.append(f"loss of a token: {loss_name(checked.token_loss)}")
    if (teacher := checked.request.teacher) is not None:
        held_gib = basis.setup.memory.teacher_bytes(*basis.setup.placement.sharing) / 2**30
        lines.append(f"teacher: {teacher.name}, {held_gib:.2f} GiB of weights on a rank, which the memory above includes")
    return "\n".join(filter(None, lines))


def _try(checked: _Checked, run: Run, test: SelfTest | None, mesh: DeviceMesh | None) -> Run:
    """Compares plans with the plain model, then gets the host memory that the longest rows need. Collective.

    Returns the run with its `retest`. Raises ValueError on every rank if a plan fails.
    """
    setup, args, control = run.setup, run.args, run.control
    lines, retest = [run.report.opening], None
    if test is not None:
        count = partial(count_over_ranks, group=control)
        place = RunPlace(
            run.pool, mesh, args.device, run.config.fp32_gradients, count, *probed(run.token_loss, run.task), fused=run.fused
        )
        lines.append(test.run(place, checked.forward if checked.request.mode.loss else ""))
        # where hooks inside mixers or indexes were looked for at the start, none may come later
        is_plain = setup.costs.model.states.is_empty and setup.costs.model.index.is_empty
        if mesh is None and setup.num_stages == 1 and is_plain:
            processor = run.sets.processor if run.sets.reads_media else None
            retest = partial(_tested_again, checked.facts.model, setup, args, place, control, processor)
    budget = setup.planner.activations
    if budget is not None and budget.host_bytes and budget.kept_tokens < setup.planner.tokens_per_rank:
        # now, since it takes long: what the longest rows need, alone and together in one step
        longest = run.sets.longest_rows("train_dataset", max(1, args.per_device_train_batch_size * args.world_size))
        lines.append(run.activations.reserve(run.source.most_host_bytes([longest[:1], longest] if longest else [])))
    run.report.opening = "\n".join(filter(None, lines))
    return replace(run, retest=retest)


def _tested_again(
    model: nn.Module,
    setup: Setup,
    args: TrainingArguments,
    place: RunPlace,
    control: dist.ProcessGroup | None,
    processor: Any,
) -> str:
    """Runs the self-test once more, on a model that is whole and at rest. Collective.

    Returns a line for the log; an empty one if there is no room for the test, so that nothing was compared.
    Raises ValueError on every rank if a plan fails.
    """
    test = SelfTest.of(ModelFacts.of(model), setup, args.device, args.bf16, control, processor)
    is_models_loss = place.token_loss is None or place.value_loss is not None
    return "" if test is None else test.run(place, user_forward(model) if is_models_loss else "")


def reference_run(run: Run, model: Any, ranges: Ranges = ()) -> Run:
    """Makes a run of a second model for forwards under the plans of `run`.

    It ends with `run`. Patches the model's attention and cuts it into as many stages. ranges: its layer ranges; by default those
    of `run`, for a model of the same class and shape.
    """
    run.undo.callback(restore_attention, model, attention_name(model))
    patch_model(model)
    model.eval()
    stage = _own_stage(ranges or run.setup.ranges, model)
    is_last = stage.stage == run.setup.num_stages - 1
    activations, routers = (
        ActivationRuntime(run.args.device, 0, run.source.set_copy_rate, is_last),
        RouterRuntime(run.args.device),
    )
    # kernels were compared with the code of the first model
    fused = FusedLayers("") if ranges else FusedLayers(run.fused.maker, grouped=run.fused.grouped)
    run.undo.callback(fused.close)
    run.undo.callback(activations.close)
    placement: Placement = run.placement
    if isinstance(placement, ShardedPlacement):
        # its weights are counted on the device
        placement = ShardedPlacement(replace(placement.shards, layers_on_host=False), placement.control)
    return replace(
        run,
        stage=stage,
        activations=activations,
        routers=routers,
        fused=fused,
        placement=placement,
        all_stages=(),
        dropout=None,
        teacher=None,
    )


def _teach(checked: _Checked, run: Run, mesh: DeviceMesh | None) -> Run:
    """Tests the teacher by itself and places it like the model; returns the run with it. Collective.

    Raises ValueError on every rank if a plan of the self-test fails on the teacher.
    """
    if (facts := checked.request.teacher) is None:
        return run
    model, config, args = facts.model, run.config, run.args
    keep_blocks(model)
    taught_by = run.setup.costs.teacher
    assert taught_by is not None
    # forwards keep nothing, under any policy
    planner = replace(run.setup.planner, activations=None)
    placement = replace(run.setup.placement, ranges=run.setup.teacher_ranges)
    setup = replace(run.setup, costs=replace(run.setup.costs, model=taught_by.model), planner=planner, placement=placement)
    run.undo.callback(restore_attention, model, attention_name(model))
    patch_model(model)
    test = SelfTest.of(facts, setup, args.device, False, run.control) if config.self_test else None
    second = reference_run(run, model, setup.ranges)
    if test is not None:
        count = partial(count_over_ranks, group=run.control)
        line = test.run(RunPlace(run.pool, mesh, args.device, config.fp32_gradients, count))
        run.report.opening += f"\nteacher: {line}"
    # no gradient is ever summed
    model.requires_grad_(False)
    if isinstance(second.placement, ShardedPlacement | StagedPlacement) and second.placement.shards is not None:
        replace(second.placement.shards, layers_on_host=False, spreads_experts=False).divide(model)
    else:
        second.placement.prepare(model)
        model.to(args.device)
    is_last = second.stage.stage == run.setup.num_stages - 1
    head = OutputHead(output_head(model), change=logit_change(model)) if is_last else None
    if head is not None:
        run.undo.callback(head.unbind)
    # code that plans put on the teacher stays there
    second = replace(second, code=CodeAtStart(facts, config.self_test, None))
    return replace(run, teacher=Teacher(second.executor(model), head))


def _note_rounded(config: LongContextConfig, model: Any, args: TrainingArguments, control: dist.ProcessGroup | None) -> None:
    """Notes which fp32 weights are gathered in bf16, since autocast rounds them anyway. Collective."""
    is_gathered = args.bf16 and args.world_size > 1 and config.parameters != "replicated"
    note_rounded(model, find_rounded(model, args.device, control) if is_gathered else ())


def _warn_of_forward(forward: str, args: TrainingArguments, loss: AnyLoss) -> None:
    """Logs that plans ignore the loss of a user's forward, if no self-test compares it with that of plans."""
    if forward and args.process_index == 0:
        way_out = "" if isinstance(loss, ValueLoss) else f"; to train another loss, {WAY_OUT}"
        logger.warning(
            "the model's forward was replaced or hooked by %s: plans train the %s of its logits, and never read a loss that it "
            "returns%s",
            forward,
            loss_name(loss),
            way_out,
        )


def _changed_settings(config: LongContextConfig) -> list[str]:
    """Returns the problem with a setting that was changed after the config was made."""
    try:
        config.check()
    except ValueError as error:
        return [str(error)]
    return []


def _lone_stage_problems(facts: ModelFacts) -> list[str]:
    """Refuses a model that was left as one stage by a training that failed."""
    if facts.loaded_ranges is not None or not refuses(facts.base):
        return []
    return [
        f"a training with pipeline stages ended in an error and left a part of {facts.name} on this rank; "
        f"load the model again, from the last checkpoint"
    ]


def _own_stage(ranges: Ranges, model: Any, heads: tuple[int, ...] = ()) -> StageModel:
    """Cuts `model` to this rank's pipeline stage and describes the stage; without a pipeline, all of `model` is one stage.

    heads: stages before the last that have the output head too.
    """
    if len(ranges) == 1:
        return whole_model(model, num_attention_layers(model))
    stage = own_stage(len(ranges))
    if loaded_ranges(model) is None:
        cut_model(model, ranges, stage, head_stages=heads)
    elif stage not in with_head(len(ranges), heads):
        # it was loaded for another run
        drop_head(find_pieces(model))
    described = stage_model(model, ranges, stage, heads)
    refuse_saving(model, held_stage(model, stage, len(ranges)))
    return described


def _new_mesh(config: LongContextConfig, setup: Setup, args: TrainingArguments) -> DeviceMesh | None:
    """Makes the mesh over which parameters are sharded; None if every rank has them whole. Collective over all ranks."""
    if setup.costs.parameters != "replicated":
        costs = setup.costs
        return shard_mesh(args.device.type, costs.shard_ranks, args.ddp_timeout, setup.num_stages, costs.node_ranks)
    if config.parameters not in ("replicated", "auto"):
        logger.warning("parameters=%r has no effect on one rank", config.parameters)
    return None


def _placement(
    config: LongContextConfig,
    setup: Setup,
    args: TrainingArguments,
    stage: StageModel,
    mesh: DeviceMesh | None,
    pool: GroupPool,
    *,
    gathers_towers: bool,
) -> Placement:
    costs = setup.costs
    ways = config.fp32_gradients, config.expert_ranks is not None, costs.model.layers_on_host, gathers_towers
    shards = None if mesh is None else Shards(mesh, args.device, *ways, costs.cluster.ranks_per_node)
    if stage.num_stages > 1:
        return StagedPlacement(stage, shards, pool, setup.ranges)
    return ReplicatedPlacement(pool.control) if shards is None else ShardedPlacement(shards, pool.control)
