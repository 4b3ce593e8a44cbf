"""`StepExecutor.run`: the interpreter of a rank's plan, one method per action kind. Read after `plan/planner.py`.

It owns the model, the group pool and the gradient sums of a step: contexts are made per chunk, results leave
through `StepResult`. Gradients are the sum over all ranks of the loss divided by the step's label tokens, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_longctx.plan.core.sharding import is_shared
from hf_longctx.plan.core.types import RankPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.output_head import check_untouched
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.clock import StepClock
from hf_longctx.runtime.core.loss import TokenScores, summed_cross_entropy, token_scores
from hf_longctx.runtime.execution.checks import forward_only, refuse_unsupported
from hf_longctx.runtime.execution.experts import RouterBalance
from hf_longctx.runtime.execution.lent_round import SharedRound
from hf_longctx.runtime.execution.results import StepMemory, StepResult
from hf_longctx.runtime.execution.round import Round
from hf_longctx.runtime.execution.stage_model import StageModel, whole_model
from hf_longctx.runtime.parameters.gradients import ReplicatedParameters, TiedWeight
from hf_longctx.runtime.parameters.sharded import parameters_of
from hf_longctx.runtime.process_groups.pool import GroupPool


class StepExecutor:
    """Runs rank plans of one model on the groups of one pool.

    `model` is the plain, DDP-wrapped or sharded (`shard_model`) model; its attention must be the registered `longctx`
    function, called `num_attention_layers` times per forward. `fp32_gradients`: gradients of weights in half precision add
    up in fp32. `engine` executes activation policies; without one, plans that have any are refused. With a head, chunks whose
    policy has `tile_tokens` make no logits, in evaluation too. `stage`: how a model that was cut into pipeline stages runs; its
    parameters are those of `model`, and `num_attention_layers` is its own. `shared_stages`: every stage of a `model` that has all
    of them, for plans with helpers; gradients then are summed over all ranks, and end the same on each, zeros where none arose.
    `routers`: those of a mixture of experts whose balance is part of the loss (`runtime/routers.py`); plans of which some
    forward comes behind a backward run all forwards once more for it, without gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        pool: GroupPool,
        num_attention_layers: int,
        device: torch.device,
        fp32_gradients: bool = True,
        engine: ActivationEngine | None = None,
        stage: StageModel | None = None,
        shared_stages: Sequence[StageModel] = (),
        routers: RouterBalance | None = None,
    ) -> None:
        self.model, self.pool, self.device, self.engine, self.routers = model, pool, device, engine, routers
        self.shared_stages = tuple(shared_stages)
        if self.shared_stages:
            stage = self.shared_stages[pool.stage]
        self.stage = whole_model(model, num_attention_layers) if stage is None else stage
        if routers is not None:
            # the model would take a balance of its own, of a chunk
            self.stage = replace(self.stage, off=("output_router_logits",))
        self.parameters = parameters_of(model, fp32_gradients)
        # of the step, until the first of its plans returns it
        self._router_loss: Tensor | None = None
        self.no_mask = no_mask(device)

    def run(
        self,
        plan: RankPlan,
        inputs: Sequence[Sequence[ChunkInputs]],
        num_label_tokens: int,
        reduce: bool = True,
        predicted_bytes: int = 0,
    ) -> StepResult:
        """Forward and backward of every round; gradients end as the sum over all ranks, sharded as the parameters are.

        `inputs[r][c]` is this rank's shard of chunk c in round r. `num_label_tokens` counts the label tokens of the step
        over all ranks. `reduce`: false for every plan of an optimizer step but its last, whose reduction then covers the
        gradients of all of them. `predicted_bytes`: what the plan was estimated to take, for the message where memory runs
        out. Every rank of the pool must call it with its own path of the same plan. Raises ValueError by name for what this
        version does not execute, torch.OutOfMemoryError naming the action that ran out of device memory. Of several plans of
        a step with `routers`, `route` comes before the first.
        """
        with self._forgetting_broken_steps():
            return self._run(plan, inputs, num_label_tokens, reduce, predicted_bytes)

    def _run(
        self,
        plan: RankPlan,
        inputs: Sequence[Sequence[ChunkInputs]],
        num_label_tokens: int,
        reduce: bool,
        predicted_bytes: int,
    ) -> StepResult:
        self.parameters.check(plan.parameters)
        self._check(plan)
        is_counted = self._begin_routing(plan, inputs, is_whole_step=reduce)
        clock = StepClock(self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        memory = StepMemory()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with self.parameters.in_step():
            for index, (group, stage) in enumerate(plan.rounds):
                self.parameters.enter_round(plan.parameters)
                where = f"step {plan.step}, round {index}"
                if is_shared(group):
                    shared = SharedRound(self, group, inputs[index], num_label_tokens, clock, index)
                    total += shared.run(where, predicted_bytes)
                    memory = memory.most(StepMemory(kv_book=shared.book_bytes))
                    continue
                current = Round(self, group, inputs[index], num_label_tokens, clock, index, stage, is_counted)
                total += current.run(stage.actions, where, predicted_bytes)
                memory = memory.most(current.memory)
        self.settle_routers()
        with clock.measure(-1, "reduce", "gradients"):
            if reduce:
                self._reduce()
            self._sum_over_ranks(total)
        router_loss, self._router_loss = self._router_loss, None
        router_load = None
        if self.routers is not None and router_loss is not None:
            total, router_load = total + router_loss, self.routers.load
        if self.routers is not None and reduce:
            self.routers.forget()
        if self.device.type == "cuda":
            memory = replace(memory, device_peak=torch.cuda.max_memory_allocated(self.device))
        return StepResult(total, clock, memory, router_loss, router_load)

    def evaluate(self, plan: RankPlan, inputs: Sequence[Sequence[ChunkInputs]]) -> Tensor:
        """The summed cross-entropy over all ranks' label tokens (fp64 scalar): forwards only, as `run` otherwise."""
        total = self._run_forwards(plan, inputs, "evaluation")
        self._sum_over_ranks(total)
        return total

    def score(self, plan: RankPlan, inputs: Sequence[Sequence[ChunkInputs]]) -> list[dict[int, TokenScores]]:
        """For every round the scores of this rank's shard of every chunk; none on stages before the last.

        Collective as `evaluate`.
        """
        scores: list[dict[int, TokenScores]] = []
        self._run_forwards(plan, inputs, "evaluation", scores=scores)
        return scores

    def route(self, plans: Sequence[tuple[RankPlan, Sequence[Sequence[ChunkInputs]]]]) -> None:
        """Counts what all plans of an optimizer step route where, forwards only, before `run` runs the first of them.

        Each plan comes with its inputs. Collective as `run`. Nothing to do for a model without a balance of its experts.
        """
        if self.routers is None or self.routers.is_settled:
            return
        self.routers.forget()
        with self._forgetting_broken_steps():
            for plan, inputs in plans:
                self._run_forwards(plan, inputs, "routing", is_counted=True)
            self._router_loss = self.routers.settle(self.pool.everyone)

    @contextmanager
    def _forgetting_broken_steps(self) -> Iterator[None]:
        """Leaves no balance of a step that raised to the next one."""
        try:
            yield
        except BaseException:
            self._router_loss = None
            if self.routers is not None:
                self.routers.forget()
            raise

    def settle_routers(self) -> None:
        """Before the first backward of a step, on every rank: the loads of its experts, if they are not known yet."""
        if self.routers is not None and not self.routers.is_settled:
            self._router_loss = self.routers.settle(self.pool.everyone)

    def _begin_routing(self, plan: RankPlan, inputs: Sequence[Sequence[ChunkInputs]], is_whole_step: bool) -> bool:
        """Whether the plan's own forwards count what is routed, since all of them come before its first backward."""
        if self.routers is None or self.routers.is_settled:
            return False
        if not is_whole_step:
            raise ValueError(
                "the model balances its experts over a whole optimizer step, of which this is one plan of several; call route() "
                "with all of them before the first one runs"
            )
        self.routers.forget()
        if not plan.forwards_first:
            self.route([(plan, inputs)])
        return plan.forwards_first

    @torch.no_grad()
    def _run_forwards(
        self,
        plan: RankPlan,
        inputs: Sequence[Sequence[ChunkInputs]],
        what: str,
        is_counted: bool = False,
        scores: list[dict[int, TokenScores]] | None = None,
    ) -> Tensor:
        """The forwards of a plan; this rank's summed cross-entropy, or zero where `scores` of tokens are asked for instead.

        `what` they are for, in errors.
        """
        self.parameters.check(plan.parameters)
        plan = forward_only(plan)
        self._check(plan)
        clock = StepClock(self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, (group, stage) in enumerate(plan.rounds):
            self.parameters.enter_round(plan.parameters)
            forwards = [action for action in stage.actions if action.kind in ("F", "SF", "RF")]
            current = Round(self, group, inputs[index], 1, clock, index, stage, is_counted)
            if scores is not None:
                current.scores = {}
                scores.append(current.scores)
            total += current.run(forwards, f"{what} {plan.step}, round {index}")
        self.parameters.free()
        return total

    def forward_chunk(self, chunk: ChunkInputs, context: GroupContext, part: int = 0, hidden_1TC: Tensor | None = None) -> Tensor:
        """Logits [1, T, V] of this rank's shard, or what leaves `part` of a pipeline, where `hidden_1TC` came in.

        Raises RuntimeError if some layer's attention did not get the plan.
        """
        with nullcontext() if context.activations is None else context.activations.running():
            return self.stage.forward(part, chunk, hidden_1TC, self.no_mask, context)

    def sum_chunk(
        self,
        chunk: ChunkInputs,
        context: GroupContext,
        tile_tokens: int = 0,
        keep_gradients: bool = False,
        part: int = 0,
        hidden_1TC: Tensor | None = None,
    ) -> Tensor:
        """The summed cross-entropy of this rank's shard, a scalar: without logits if there are `tile_tokens` and a head.

        `chunk` may be on the host. `keep_gradients`: its backward comes next. `part`, `hidden_1TC`: as for `forward_chunk`.
        """
        inputs = chunk.to(self.device)
        head = self.engine.head if self.engine is not None else None
        if head is None or not tile_tokens:
            return summed_cross_entropy(self.forward_chunk(inputs, context, part, hidden_1TC), inputs.shift_labels)
        # labels on the host tell which tiles have any, without waiting for the device
        with head.summing(chunk.shift_labels, tile_tokens, keep_gradients):
            loss = self.forward_chunk(inputs, context, part, hidden_1TC)
        check_untouched(loss)
        return loss

    def score_chunk(
        self, chunk: ChunkInputs, context: GroupContext, tile_tokens: int, part: int, hidden_1TC: Tensor | None
    ) -> TokenScores:
        """The scores of this rank's shard, with logits or without as `sum_chunk`."""
        inputs = chunk.to(self.device)
        head = self.engine.head if self.engine is not None else None
        if head is None or not tile_tokens:
            return token_scores(self.forward_chunk(inputs, context, part, hidden_1TC), inputs.shift_labels)
        with head.scoring(chunk.shift_labels, tile_tokens) as scores:
            self.forward_chunk(inputs, context, part, hidden_1TC)
        return scores[0]

    def _check(self, plan: RankPlan) -> None:
        """Raises ValueError by name for a plan of other stages than the model's, and for what is not executed."""
        held = self.stage.num_stages, len(self.stage.attention_layers)
        for group, stage in plan.rounds:
            if (planned := (len(group.stages), len(stage.parts))) != held:
                raise ValueError(
                    f"the plan has {planned[0]} pipeline stage(s) of {planned[1]} part(s), the model was cut into {held[0]} of "
                    f"{held[1]}; plan with stages={held[0]}"
                )
            layers = tuple(part.num_layers for part in stage.parts)
            if held[0] > 1 and layers != self.stage.attention_layers:
                raise ValueError(
                    f"the plan has {layers} layers on stage {stage.stage}, part by part, where the model has "
                    f"{self.stage.attention_layers}; plan with the layers that the model was cut into"
                )
            if len(stage.parts) > 1 and plan.parameters != "replicated":
                raise ValueError(
                    f"{len(stage.parts)} interleaved parts of a stage need replicated parameters, not {plan.parameters}"
                )
        if self.routers is not None and self.shared_stages:
            raise ValueError(
                "a balance of experts is not executed together with helpers; set output_router_logits=False in the model's "
                "config, or plan without helpers"
            )
        refuse_unsupported(plan, self.engine, has_all_stages=bool(self.shared_stages))

    def _reduce(self) -> None:
        if self.shared_stages:
            assert isinstance(self.parameters, ReplicatedParameters)
            self.parameters.complete()
            self.parameters.reduce(self.pool.everyone)
        else:
            self.parameters.reduce(self.pool.stage_group, self._tied())

    def _tied(self) -> TiedWeight | None:
        """The weight that the other end of the pipeline has too, if there is one."""
        if not self.stage.tied or self.pool.links is None or self.pool.links.ends is None:
            return None
        return TiedWeight(self.model.get_parameter(self.stage.tied), self.pool.links.ends)

    def _sum_over_ranks(self, total: Tensor) -> None:
        if self.pool.everyone is not None:
            dist.all_reduce(total, group=self.pool.everyone)


def no_mask(device: torch.device) -> Tensor:
    """An attention mask of four dimensions: transformers passes it on as it is, and builds none over the packed row."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
