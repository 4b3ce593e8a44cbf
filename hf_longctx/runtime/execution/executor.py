"""Runs a rank's plan, micro-batch by micro-batch or in turns (`StepExecutor.run`). Read after `plan/planner.py`.

The executor owns the model, the group pool and the gradient sums of a step. A `Round` (`round.py`) executes this rank's actions
of one micro-batch, and `StepResult` holds the results. Under any plan, gradients are those of the loss summed over all ranks and
divided by the step's number of label tokens, or by the sum of their weights.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from hf_longctx.plan.core.lending import is_lent
from hf_longctx.plan.core.types import LayerRange, RankPlan, frees_every_round
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.clock import StepClock
from hf_longctx.runtime.core.loss import AnyLoss, Distillation, Scoring, TokenScores, TokenTally
from hf_longctx.runtime.execution.checks import check_weights, forward_only, refuse_unsupported
from hf_longctx.runtime.execution.experts import RouterBalance
from hf_longctx.runtime.execution.lending import LentRound
from hf_longctx.runtime.execution.round import (
    OutOfMemoryTogether,
    Round,
    RoundHost,
    StepMemory,
    StepResult,
    Wanted,
    active_bytes,
    run_rounds,
)
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.parameters.gradients import Send, TiedWeight, has_nonfinite_gradient
from hf_longctx.runtime.parameters.host_steps import HostSteps
from hf_longctx.runtime.parameters.sharded import parameters_of
from hf_longctx.runtime.process_groups import GroupPool, StageMessages, sum_over_ranks

# inputs[r][c]: this rank's shard of chunk c in micro-batch r
PlanInputs = Sequence[Sequence[ChunkInputs]]


class StepExecutor:
    """Runs rank plans of one model on the groups of one pool.

    stage: the whole model (`whole_model`) or one stage of a pipeline; parameters may be plain, under DDP or sharded
    (`shard_model`), and attention must be the registered `longctx` function.
    fp32_gradients: sum gradients of half-precision weights in fp32.
    all_stages: for plans that lend ranks, all stages, including `stage`, of a model with the weights of all of them. Gradients
    are then summed over all ranks and equal on each.
    routers: balance of experts, if it is part of the loss (`execution/experts.py`). If a plan has a forward after a backward, all
    forwards first run once without gradients to count the routed tokens.
    token_loss: the loss of a token; None for cross-entropy. A `Distillation` needs `teacher`.
    """

    # runs the forwards of a teacher for the plans of this model; None without one
    teacher: Teacher | None = None

    def __init__(
        self,
        stage: StageModel,
        pool: GroupPool,
        device: torch.device,
        fp32_gradients: bool = True,
        all_stages: Sequence[StageModel] = (),
        routers: RouterBalance | None = None,
        token_loss: AnyLoss = None,
    ) -> None:
        self.token_loss = token_loss
        self.model, self.pool, self.device, self.routers = stage.model, pool, device, routers
        self.all_stages = tuple(all_stages)
        # switched off, because the model would add a balance loss of its own, over one chunk
        self.stage = stage if routers is None else replace(stage, off=("output_router_logits",))
        seldom = stage.tied if stage.head_stages else ""
        self.parameters = parameters_of(stage.model, fp32_gradients, stage.num_stages, stage.attention_layers, seldom)
        # balance loss of the current step, until its first plan returns it
        self._aux_loss: Tensor | None = None
        # whether a plan of the current optimizer step has already run
        self._is_in_step = False
        self._no_mask = no_mask(device)
        # takes gradients in the last backward of a step, if only clipping changes them before the update
        self.early_updates: HostSteps | None = None
        # describes code that was added to the model since the start without a check
        self.added_code: Callable[[], str] = str

    def run(
        self,
        plan: RankPlan,
        inputs: PlanInputs,
        num_label_tokens: float,
        reduce: bool = True,
        predicted_bytes: int = 0,
        engine: ActivationEngine | None = None,
        tally: TokenTally | None = None,
    ) -> StepResult:
        """Runs forward and backward of every micro-batch; leaves gradients summed over all ranks, sharded like the parameters.

        num_label_tokens: label tokens of the step over all ranks, or the sum of their weights. reduce: false for every plan of an
        optimizer step except the last, whose reduction then covers the gradients of all plans. predicted_bytes: estimated bytes
        of the plan, for the out-of-memory message. engine: executes activation policies; without it, plans with policies are
        refused. If it has a head, chunks whose policy has `tile_tokens` make no logits. tally: counts this rank's label tokens;
        the result has the sums over all ranks.

        Every rank of the pool must call it with its own path of the same plan. Raises ValueError naming what cannot be executed,
        and torch.OutOfMemoryError naming the action that ran out of device memory. A rank whose passes need no other rank then
        takes part in the sums at the end of the plan, after which all ranks raise OutOfMemoryTogether; other ranks would wait for
        it inside a pass. With `routers`, call `route` before the first plan of a step that has several.
        """
        with self._forgetting_broken_steps():
            return self._run(plan, inputs, num_label_tokens, reduce, predicted_bytes, engine, tally)

    def _run(
        self,
        plan: RankPlan,
        inputs: PlanInputs,
        num_label_tokens: float,
        reduce: bool,
        predicted_bytes: int,
        engine: ActivationEngine | None,
        tally: TokenTally | None,
    ) -> StepResult:
        self._begin_plan(plan)
        self.parameters.check(plan.parameters)
        self._check(plan, engine)
        if not self._is_in_step:
            weights = self.parameters.gradients.parameters
            check_weights(self.stage, self.pool, weights, bool(self.all_stages), self.added_code())
        self._is_in_step = not reduce
        is_counted = self._begin_routing(plan, inputs, is_whole_step=reduce, engine=engine)
        host = self._host(plan, num_label_tokens, engine, tally)
        rounds: list[Round] = []
        with self.parameters.computing():
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            memory, failure = StepMemory(), ""
            # plans that lend ranks sum over all stages, in another group
            early_group = self.pool.early if reduce and not self.all_stages else None
            try:
                with self.parameters.in_step(reduce, early_group, self._send(reduce)), self._taught(plan, inputs) as taught:
                    rounds += [
                        LentRound(host, group, stage, taught[index], index)
                        if is_lent(group)
                        else Round(host, group, stage, taught[index], index, is_counted)
                        for index, (group, stage) in enumerate(plan.rounds)
                    ]
                    memory = run_rounds(host, plan, rounds, f"step {plan.step}", predicted_bytes)
            except torch.OutOfMemoryError as error:
                failure = self._told_later(plan, error)
            if failure:
                # the error is gone, and with it the tensors of its frames
                rounds.clear()
                gc.collect()
                torch.cuda.empty_cache()
                # memory may have run out before a gradient was added to its sum, whose dtype is that of the other ranks
                self.parameters.after_backward()
            total = self._sum_of(rounds)
            if reduce:
                # weights stay gathered for all plans of the step
                self.parameters.free()
            self._settle_routers()
            with host.clock.measure(-1, "reduce", "gradients"):
                is_bad = torch.zeros_like(total)
                if reduce:
                    # rounds fp32 sums, which frees memory for weights that come back
                    self._reduce()
                    is_bad = has_nonfinite_gradient(self.model.parameters(), self.device, self.pool.num_ranks)
                own = torch.cat([torch.stack([total, is_bad]), *([] if tally is None else [tally.sums_3])])
                total, num_bad, *tallied = self._sum_or_fail(plan, own, failure, f"step {plan.step}")
            if self.device.type == "cuda":
                memory = replace(memory, device_peak=active_bytes(self.device)[1])
        aux_loss, self._aux_loss = self._aux_loss, None
        router_load = None
        if self.routers is not None and aux_loss is not None:
            total, router_load = total + self.routers.coefficient * aux_loss, self.routers.load
        if self.routers is not None and reduce:
            self.routers.forget()
        return StepResult(total, host.clock, memory, aux_loss, router_load, num_bad, tuple(tallied))

    def _told_later(self, plan: RankPlan, error: torch.OutOfMemoryError) -> str:
        """Returns the words of an error of which `_sum_or_fail` is to tell all ranks; raises it if it cannot."""
        if self.pool.num_ranks == 1:
            raise error
        others_wait = self._others_wait(plan)
        if not others_wait and any(group.degree > 1 for group, _ in plan.rounds):
            others_wait = "ranks that share its sequences wait for this one"
        if others_wait:
            raise torch.OutOfMemoryError(f"{error}. It cannot run again for less memory: {others_wait}") from error
        return str(error) or type(error).__name__

    def _sum_or_fail(self, plan: RankPlan, own: Tensor, failure: str, where: str) -> Tensor:
        """Sums a vector over all ranks; raises OutOfMemoryTogether on all of them if one has a `failure`. Collective."""
        if self.pool.num_ranks == 1 or self._others_wait(plan):
            return sum_over_ranks(own, self.pool.everyone)
        sums = sum_over_ranks(torch.cat([own, own.new_full((1,), bool(failure))]), self.pool.everyone)
        # waits for the device, as the sums of gradients do
        if num_failed := int(sums[-1]):
            raise OutOfMemoryTogether(failure or f"{where}: {num_failed} other rank(s) ran out of device memory")
        return sums[:-1]

    def _others_wait(self, plan: RankPlan) -> str:
        """Describes why a rank that runs out of memory cannot take part in the sums at the end of a plan; equal on all ranks.

        Empty if passes have no collectives but those of their groups. Then these sums tell all ranks of it.
        """
        if self.stage.num_stages > 1:
            return "other stages wait for this rank inside the passes"
        if plan.parameters != "replicated":
            return f"weights are {plan.parameters.replace('_', ' ')}, so other ranks wait for this one's share in every layer"
        if self.routers is not None:
            return "experts are balanced with other ranks, which wait for this one"
        # weights that were updated on the host during the passes could not be taken back
        return "" if self.early_updates is None else "gradients have left for updates on the host"

    def evaluate(
        self,
        plan: RankPlan,
        inputs: PlanInputs,
        engine: ActivationEngine | None = None,
        tally: TokenTally | None = None,
    ) -> Tensor:
        """Returns the weighted loss sum over all ranks' label tokens (fp64 scalar). Runs only forwards, otherwise like `run`.

        tally: counts this rank's label tokens. Raises OutOfMemoryTogether on all ranks where `run` does.
        """
        total, failure = self._sum_of([]), ""
        try:
            with self._taught(plan, inputs) as taught:
                total = self._run_forwards(plan, taught, "evaluation", engine, wanted=tally or "loss")
        except torch.OutOfMemoryError as error:
            failure = self._told_later(plan, error)
        return self._sum_or_fail(plan, total.reshape(1), failure, f"evaluation {plan.step}")[0]

    def score(
        self,
        plan: RankPlan,
        inputs: PlanInputs,
        engine: ActivationEngine | None = None,
        scoring: Scoring | None = None,
        is_counted: bool = False,
    ) -> list[dict[int, TokenScores]]:
        """Returns, per micro-batch, scores of this rank's shard of every chunk; empty on stages before the last.

        is_counted: balanced routers count the experts of tokens until the next step. Collective, like `evaluate`.
        """
        rounds: list[Round] = []
        self._run_forwards(plan, inputs, "evaluation", engine, is_counted=is_counted, wanted=scoring or Scoring(), rounds=rounds)
        return [each.scores for each in rounds]

    def read(self, plan: RankPlan, inputs: PlanInputs, engine: ActivationEngine | None = None) -> list[dict[int, Tensor]]:
        """Returns logits [n, V] of the tokens with labels in this rank's shard of every chunk; like `score`. Collective."""
        rounds: list[Round] = []
        self._run_forwards(plan, inputs, "evaluation", engine, wanted="logits", rounds=rounds)
        return [each.logits for each in rounds]

    def read_inputs(self, plan: RankPlan, inputs: PlanInputs, head: OutputHead | None) -> list[dict[int, Tensor]]:
        """Returns what `head` gets, [1, T, C], in the forwards of this rank's shard of every chunk. Collective, like `score`.

        The head does not run. None on stages before the last, whose results are empty. Afterwards its weights stay gathered
        until the executor's `parameters` are freed.
        """
        rounds: list[Round] = []
        self._run_forwards(plan, inputs, "teacher", None, wanted=head or "logits", rounds=rounds, keeps_ends=True)
        found = [dict(each.head_inputs) for each in rounds]
        for each in rounds:
            # rounds live until the collector finds them
            each.head_inputs.clear()
        return found

    def _taught(self, plan: RankPlan, inputs: PlanInputs) -> AbstractContextManager[PlanInputs]:
        """Context with the inputs of a plan and the states of the teacher, if there is one."""
        return nullcontext(inputs) if self.teacher is None else self.teacher.taught(plan, inputs)

    def route(self, plans: Sequence[tuple[RankPlan, PlanInputs]], engine: ActivationEngine | None = None) -> None:
        """Counts the experts of all tokens of an optimizer step, by forwards of its plans. Call it before `run`.

        plans: each with its inputs. Collective, like `run`. Does nothing for a model whose experts are not balanced.
        """
        if self.routers is None or self.routers.is_settled:
            return
        self.routers.forget()
        with self._forgetting_broken_steps():
            for plan, inputs in plans:
                # a loss beside a teacher needs its states, which nothing here reads
                wanted: Wanted = Scoring() if isinstance(self.token_loss, Distillation) else "loss"
                self._run_forwards(plan, inputs, "routing", engine, is_counted=True, wanted=wanted)
            self._aux_loss = self.routers.settle(self.pool.everyone)

    def balance(self, sums_2E: Tensor, coefficient: Tensor) -> None:
        """Adds `coefficient` (a scalar) times the balance loss, whose loads are known, to the next plan's loss.

        sums_2E: result of `RouterBalance.summed`.
        """
        assert self.routers is not None
        self._aux_loss = self.routers.take(sums_2E, coefficient)

    @contextmanager
    def _forgetting_broken_steps(self) -> Iterator[None]:
        """Context that drops the state of a step that raises: the next step has no expert balance and no sums of it."""
        try:
            yield
        except BaseException as error:
            self._aux_loss, self._is_in_step = None, False
            if not isinstance(error, OutOfMemoryTogether):
                # sums already started would be matched with those of a later step
                self.pool.drop_early()
            if self.routers is not None:
                self.routers.forget()
            self.parameters.forget()
            raise

    def _settle_routers(self) -> None:
        """Sums the loads of the experts over all ranks, unless done; runs before a step's first backward."""
        if self.routers is not None and not self.routers.is_settled:
            self._aux_loss = self.routers.settle(self.pool.everyone)

    def _begin_routing(self, plan: RankPlan, inputs: PlanInputs, is_whole_step: bool, engine: ActivationEngine | None) -> bool:
        """Prepares the count of routed tokens; returns whether the plan's forwards count them, all before its first backward."""
        if self.routers is None or self.routers.is_settled:
            return False
        if not is_whole_step:
            raise ValueError(
                "the model balances its experts over a whole optimizer step, and this plan is one of several in its step; call "
                "route() with all of them before the first one runs"
            )
        self.routers.forget()
        if not plan.forwards_first:
            self.route([(plan, inputs)], engine)
        return plan.forwards_first

    @torch.no_grad()
    def _run_forwards(
        self,
        plan: RankPlan,
        inputs: PlanInputs,
        purpose: str,
        engine: ActivationEngine | None,
        is_counted: bool = False,
        wanted: Wanted = "loss",
        *,
        rounds: list[Round] | None = None,
        keeps_ends: bool = False,
    ) -> Tensor:
        """Runs the forwards of a plan; returns this rank's summed loss, or zero if something else is `wanted`.

        purpose: name of the run in error messages. rounds: list to fill with the micro-batches, which hold what is wanted.
        keeps_ends: weights outside of the layers stay gathered.
        """
        self._begin_plan(plan)
        self.parameters.check(plan.parameters)
        plan = forward_only(plan, tiles_heads=engine is not None)
        self._check(plan, engine)
        host = self._host(plan, 1, engine, wanted if isinstance(wanted, TokenTally) else None)
        made = [
            Round(host, group, stage, inputs[index], index, is_counted, wanted)
            for index, (group, stage) in enumerate(plan.rounds)
        ]
        with self.parameters.computing():
            try:
                run_rounds(host, plan, made, f"{purpose} {plan.step}")
            except BaseException:
                # gradients of a step that goes on after these forwards stay
                self.parameters.end_passes()
                raise
            self.parameters.free(keeps_ends)
        if rounds is not None:
            rounds += made
        return self._sum_of(made)

    def _sum_of(self, rounds: Sequence[Round]) -> Tensor:
        """Returns this rank's share of the loss."""
        return sum((each.total for each in rounds), torch.zeros((), dtype=torch.float64, device=self.device))

    def _begin_plan(self, plan: RankPlan) -> None:
        if self.stage.dropout is not None:
            self.stage.dropout.begin_plan(plan.step)

    def _host(
        self, plan: RankPlan, num_label_tokens: float, engine: ActivationEngine | None, tally: TokenTally | None
    ) -> RoundHost:
        links = self.pool.links
        return RoundHost(
            pool=self.pool,
            stage=self.stage,
            device=self.device,
            parameters=self.parameters,
            clock=StepClock(self.device),
            num_label_tokens=num_label_tokens,
            no_mask=self._no_mask,
            messages=None if links is None else StageMessages(links, self.stage.hidden_dtype, self.device),
            engine=engine,
            all_stages=self.all_stages,
            routers=self.routers,
            settle_routers=self._settle_routers,
            token_loss=self.token_loss,
            tally=tally,
            teacher_head=None if self.teacher is None else self.teacher.head,
            blocks_of=plan.blocks_of,
        )

    def _check(self, plan: RankPlan, engine: ActivationEngine | None) -> None:
        """Raises ValueError if the plan's stages are not the model's, or if a setting of the plan cannot be executed."""
        held = self.stage.num_stages, len(self.stage.attention_layers)
        for group, stage in plan.rounds:
            if (planned := (len(group.stages), len(stage.layer_ranges))) != held:
                raise ValueError(
                    f"the plan has {planned[0]} pipeline stage(s) of {planned[1]} layer range(s) each, but the model was cut "
                    f"into {held[0]} of {held[1]}; plan with stages={held[0]} and interleave={held[1]}"
                )
            layers = tuple(layer_range.num_layers for layer_range in stage.layer_ranges)
            if held[0] > 1 and layers != self.stage.attention_layers:
                raise ValueError(
                    f"the layer ranges of stage {stage.stage} have {layers} layers in the plan, but "
                    f"{self.stage.attention_layers} in the model; plan with the layers that the model was cut into"
                )
            if len(stage.layer_ranges) > 1 and frees_every_round(plan.parameters):
                raise ValueError(
                    f"the plan interleaves {len(stage.layer_ranges)} layer ranges per stage with parameters={plan.parameters!r}, "
                    f"which are freed with the last backward of a whole stage; plan with 'sharded', 'gathered_per_step' or "
                    f"'replicated'"
                )
        if self.routers is not None and self.all_stages:
            raise ValueError(
                "the model balances its experts and the plan may lend ranks, which cannot be executed together; set "
                "output_router_logits=False in the model's config, or lend_stages=False"
            )
        # the states of a teacher are on the last stage
        is_taught = self.teacher is not None or isinstance(self.token_loss, Distillation)
        refuse_unsupported(plan, engine, bool(self.all_stages), () if is_taught else self.stage.head_stages)

    def _send(self, is_last: bool) -> Send | None:
        """Returns the function that takes gradients which are final in the last backward of a step; None if none are."""
        if self.early_updates is None or not is_last:
            return None
        self.early_updates.forget_early()
        # sums over ranks, also that of a tied weight, come after the backward
        is_alone = self.pool.stage_group is None and not self.all_stages and not self.stage.tied
        return self.early_updates.send_early if is_alone else None

    def _reduce(self) -> None:
        if self.all_stages:
            self.parameters.reduce(self.pool.everyone)
        else:
            self.parameters.reduce(self.pool.stage_group, self._tied())

    def _tied(self) -> TiedWeight | None:
        """Returns the weight that this stage shares with others, if there is one."""
        if not self.stage.tied or self.pool.links is None:
            return None
        return TiedWeight(self.model.get_parameter(self.stage.tied), self.pool.links.shared[self.stage.tied_stages])


class Teacher:
    """A frozen model whose hidden states before its head are the targets of another one, under that model's plans.

    Its forwards run before those of a plan, in the same groups, chunks and stages, without its head. The loss computes its
    logits in the same tiles of tokens as the model's own, so that whole logits of neither exist. Meanwhile the hidden states of
    a rank's tokens lie on the host.

    executor: of the teacher. head: bound to its output head; None on stages before the last.
    """

    def __init__(self, executor: StepExecutor, head: OutputHead | None) -> None:
        self.executor, self.head = executor, head
        # cutting a model into stages makes new modules
        executor.model.eval()

    @contextmanager
    def taught(self, plan: RankPlan, inputs: PlanInputs) -> Iterator[PlanInputs]:
        """Context in which `inputs` of a plan have the teacher's states, and its head can run. Collective, like `run`.

        Raises ValueError if the teacher was put into training mode.
        """
        if any(module.training for module in self.executor.model.modules()):
            raise ValueError(
                "the teacher was put into training mode, in which dropout would change its targets; call teacher.eval(), and do "
                "not train it beside the model"
            )
        try:
            found = self.executor.read_inputs(self._plan(plan), inputs, self.head)
            yield [
                [self._with_states(chunk, states.get(index)) for index, chunk in enumerate(chunks)]
                for chunks, states in zip(inputs, found, strict=True)
            ]
        finally:
            self.executor.parameters.free()

    def _plan(self, plan: RankPlan) -> RankPlan:
        """Returns the forwards of a plan with the layer ranges of the teacher, without tiles, which only losses have."""
        counts = self.executor.stage.attention_layers
        starts = [sum(counts[:place]) for place in range(len(counts))]
        ranges = tuple(LayerRange(start, count) for start, count in zip(starts, counts, strict=True))
        only = forward_only(plan)
        rounds = tuple((group, replace(stage, layer_ranges=ranges, activations=())) for group, stage in only.rounds)
        return replace(only, rounds=rounds)

    def _with_states(self, chunk: ChunkInputs, states_1TC: Tensor | None) -> ChunkInputs:
        return chunk if states_1TC is None else replace(chunk, teacher_1TC=states_1TC)


def no_mask(device: torch.device) -> Tensor:
    """Makes a 4-D attention mask, which transformers passes on unchanged instead of building one over the packed row."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
