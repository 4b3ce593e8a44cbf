"""Plans of pipelines by hand and at random, and one step of them on a pool of gloo ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from helpers.models.models import ModelCase, build_model
from helpers.plans.sliced import Chunks, Rows
from helpers.plans.steps import rank_inputs, whole
from helpers.ranks.ranks import lasting
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from hf_longctx.hf.models.attention import patch_model
from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.routers import router_balance
from hf_longctx.plan.core.serialize import plan_from_json
from hf_longctx.plan.core.types import Action, ActivationPolicy, Chunk, MicroBatch, Parameters, SequenceGroup, Span, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.pipeline.orders import Schedule, layer_ranges, pipelined
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.parameters.sharded import shard_mesh, shard_model
from hf_longctx.runtime.process_groups.pool import GroupPool

CPU = torch.device("cpu")
# pools of this process, made once per number of stages
_POOLS: dict[int, GroupPool] = {}


def pipeline_plan(
    lengths: Sequence[int],
    micro_batches: Sequence[Sequence[tuple[int, Chunks]]],
    num_stages: int,
    schedule: Schedule = "elastic",
    num_layers: int = 4,
    num_parts: int = 1,
    parameters: Parameters = "replicated",
) -> StepPlan:
    """The validated plan of micro-batches of (degree, chunks) at consecutive positions, each a pipeline of its own."""
    parts = layer_ranges(num_layers, num_stages, num_parts)
    rounds = []
    for groups in micro_batches:
        first, found = 0, []
        for degree, chunks in groups:
            bare = SequenceGroup(
                positions=tuple(range(first, first + degree)),
                method="local" if degree == 1 else "ulysses",
                chunks=tuple(Chunk(index, tuple(Span(*span) for span in spans)) for index, spans in enumerate(chunks)),
                stages=(),
            )
            found.append(pipelined(bare, parts, schedule))
            first += degree
        rounds.append(MicroBatch(tuple(found)))
    plan = StepPlan(0, tuple(lengths), num_stages, sum(degree for degree, _ in micro_batches[0]), parameters, tuple(rounds))
    return validate_plan(plan)


def with_policies(plan: StepPlan, policies: Sequence[ActivationPolicy]) -> StepPlan:
    """The plan with the policies of `policies` in turn, over all chunks and parts of all stages."""
    given = iter(policies)

    def of_group(group: SequenceGroup) -> SequenceGroup:
        stages = tuple(
            replace(
                stage,
                activations=tuple(
                    replace(policy, chunk=chunk.index, part=part, layers=policy.layers[: stage.parts[part].num_layers])
                    for chunk in group.chunks
                    for part in range(len(stage.parts))
                    if (policy := next(given))
                ),
            )
            for stage in group.stages
        )
        return replace(group, stages=stages)

    return validate_plan(
        replace(plan, micro_batches=tuple(MicroBatch(tuple(map(of_group, each.groups))) for each in plan.micro_batches))
    )


def num_policies(plan: StepPlan) -> int:
    """How many policies `with_policies` takes."""
    return sum(
        len(group.chunks) * len(stage.parts) for each in plan.micro_batches for group in each.groups for stage in group.stages
    )


@st.composite
def random_chunks(draw: st.DrawFn, sequences: Sequence[int], lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Sequences in slices, hybrids and packs, family by family."""
    chunks: list[list[tuple[int, int, int]]] = []
    for sequence in sequences:
        bounds = sorted({0, lengths[sequence], *draw(st.lists(st.integers(1, lengths[sequence]), max_size=4))})
        spans = [(sequence, start, stop) for start, stop in pairwise(bounds)]
        if len(spans) == 1 and chunks and draw(st.booleans()):
            # behind a tail or another whole sequence
            chunks[-1].append(spans[0])
        else:
            chunks += [[span] for span in spans]
    return chunks


def stage_pool(num_stages: int, timeout_s: float = 60.0) -> GroupPool:
    """This rank's pool for so many stages, made once per process."""
    if num_stages not in _POOLS:
        degrees = tuple(range(1, dist.get_world_size() + 1))
        _POOLS[num_stages] = lasting(lambda: GroupPool(degrees, timeout_s, num_stages=num_stages))
    return _POOLS[num_stages]


def stage_mesh(num_stages: int, shard_ranks: int) -> DeviceMesh:
    """The mesh of a stage's shards."""
    return shard_mesh("cpu", shard_ranks, 60.0, num_stages)


def stage_step_on_rank(
    case: ModelCase, plan_json: str, rows: Rows, lora: bool = False
) -> tuple[float, dict[str, torch.Tensor], list[str], Any]:
    """One step on this rank: loss, gradients of its stage's parameters, the computed actions in order, and the memory."""
    plan = plan_from_json(plan_json)
    pool = stage_pool(plan.num_stages)
    model = adapted(build_model(case)) if lora else build_model(case)
    patch_model(model)
    ranges = [stage.parts for stage in plan.micro_batches[0].groups[0].stages]
    cut_model(model, ranges, pool.stage)
    stage = stage_model(model, ranges, pool.stage)
    if plan.parameters != "replicated":
        shard_model(model, build_model(case)._no_split_modules, stage_mesh(plan.num_stages, pool.ranks_per_stage))
    has_policies = any(each.activations for b in plan.micro_batches for group in b.groups for each in group.stages)
    is_last = pool.stage == plan.num_stages - 1
    head = OutputHead(output_head(model)) if has_policies and is_last else None
    engine = ActivationEngine(layer_modules(model), HostTier.on(CPU, 2**24), head) if has_policies else None
    routers = router_balance(model, CPU)
    executor = StepExecutor(stage, pool, CPU, case.fp32_gradients, routers=routers)
    batch = rank_inputs(plan, rows, pool.rank)
    num_label_tokens = sum(label != -100 for row in rows for label in row["labels"][1:])
    result = executor.run(plan.for_rank(pool.rank), batch["chunks"], num_label_tokens, engine=engine)
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    words = [interval.name for interval in result.intervals() if interval.round >= 0]
    return float(result.loss), gradients, words, result.memory


def adapted(model: Any) -> Any:
    """The model with LoRA adapters that change something."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    adapted_model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted_model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.2
    return adapted_model


def planned_words(plan: StepPlan, rank: int) -> list[str]:
    """The actions of a rank in the order of the plan."""
    return [str(action) for _, stage in plan.for_rank(rank).rounds for action in stage.actions]


def computed(actions: Sequence[Action]) -> list[str]:
    """Forwards and backwards alone."""
    return [str(action) for action in actions if action.kind in "FB"]
