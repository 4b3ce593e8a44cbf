"""Services that a step gives to its micro-batches: groups, the stage's model, the forward of a chunk and its loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.output_head import loss_of
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.clock import StepClock
from hf_longctx.runtime.core.loss import (
    Scoring,
    Targets,
    TokenLoss,
    TokenScores,
    TokenTally,
    label_logits,
    summed_loss,
    token_scores,
)
from hf_longctx.runtime.core.value_losses import ValueLoss
from hf_longctx.runtime.execution.experts import RouterBalance
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.parameters.gradients import ReplicatedParameters
from hf_longctx.runtime.parameters.sharded import ShardedParameters
from hf_longctx.runtime.process_groups.pool import GroupPool


@dataclass(frozen=True, slots=True, eq=False)
class RoundHost:
    """Everything a round takes from its step; one per plan that runs.

    engine: executes the plan's activation policies, and, if it has a head, sums losses without whole logits. all_stages: every
    stage of the model, for plans that lend ranks to other stages. routers: the routers whose balance is part of the loss.
    settle_routers: sums their counts over all ranks, once, before the first backward. token_loss: the loss of a token; None for
    cross-entropy. num_label_tokens: label tokens of the step over all ranks, or the sum of their weights. tally: counts the label
    tokens of this rank's forwards.
    """

    pool: GroupPool
    stage: StageModel
    device: torch.device
    parameters: ReplicatedParameters | ShardedParameters
    clock: StepClock
    num_label_tokens: float
    no_mask: Tensor
    engine: ActivationEngine | None = None
    all_stages: tuple[StageModel, ...] = ()
    routers: RouterBalance | None = None
    settle_routers: Callable[[], None] = lambda: None
    token_loss: TokenLoss | ValueLoss | None = None
    tally: TokenTally | None = None

    def targets(self, inputs: ChunkInputs) -> Targets:
        """Targets of the tokens of a chunk, on the device of `inputs`."""
        return Targets.of(inputs, self.token_loss, self.tally)

    def forward_chunk(self, chunk: ChunkInputs, context: GroupContext, part: int = 0, hidden_1TC: Tensor | None = None) -> Tensor:
        """Logits [1, T, V] of this rank's shard from the last part; hidden states for the next one from every other part.

        hidden_1TC: hidden states of the part before. Raises RuntimeError if some layer's attention did not get the plan.
        """
        with nullcontext() if context.activations is None else context.activations.running():
            return self.stage.forward(part, chunk, hidden_1TC, self.no_mask, context)

    def sum_chunk(
        self,
        chunk: ChunkInputs,
        context: GroupContext,
        tile_tokens: int,
        keep_gradients: bool,
        part: int,
        hidden_1TC: Tensor | None,
    ) -> Tensor:
        """The summed loss of this rank's shard, a scalar; without whole logits if the engine has a head and `tile_tokens`.

        `chunk` may be on the host. keep_gradients: the chunk's backward comes next, so the head keeps its gradients.
        """
        inputs = chunk.to(self.device)
        head = self.engine.head if self.engine is not None else None
        if head is None or not tile_tokens:
            return summed_loss(self.forward_chunk(inputs, context, part, hidden_1TC), self.targets(inputs))
        # labels on the host tell which tiles have any, without waiting for the device
        with head.summing(self.targets(chunk), tile_tokens, keep_gradients):
            returned = self.forward_chunk(inputs, context, part, hidden_1TC)
        return loss_of(returned)

    def score_chunk(
        self,
        chunk: ChunkInputs,
        context: GroupContext,
        tile_tokens: int,
        part: int,
        hidden_1TC: Tensor | None,
        scoring: Scoring,
    ) -> TokenScores:
        """Scores of this rank's shard; like `sum_chunk`, it makes whole logits only if it must."""
        inputs = chunk.to(self.device)
        head = self.engine.head if self.engine is not None else None
        if head is None or not tile_tokens:
            return token_scores(self.forward_chunk(inputs, context, part, hidden_1TC), inputs.shift_labels, scoring)
        with head.scoring(chunk.shift_labels, tile_tokens, scoring) as scores:
            self.forward_chunk(inputs, context, part, hidden_1TC)
        return scores[0]

    def read_chunk(
        self, chunk: ChunkInputs, context: GroupContext, tile_tokens: int, part: int, hidden_1TC: Tensor | None
    ) -> Tensor:
        """Logits [n, V] of the tokens of this rank's shard with labels; makes others only if it must, like `score_chunk`."""
        inputs = chunk.to(self.device)
        head = self.engine.head if self.engine is not None else None
        if head is None or not tile_tokens:
            return label_logits(self.forward_chunk(inputs, context, part, hidden_1TC), inputs.shift_labels)
        with head.reading(chunk.shift_labels, tile_tokens) as logits:
            self.forward_chunk(inputs, context, part, hidden_1TC)
        return logits[0]
