"""Bytes that graphs of towers add to the peak of a step, by the plan's prediction, and as torch really allocates them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers.measures.allocations import measure
from helpers.models.media_rows import MediaCase, num_labels
from helpers.plans.layouts import plan_of

from hf_longctx.hf.data.collator import LongContextCollator, PlannedDataset, PlannedStep
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.spec import model_spec, trained_tower
from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec
from hf_longctx.plan.core.sharding import images_of
from hf_longctx.plan.core.types import MicroBatch, StepPlan, TowerRun, TowerWork
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.runtime.core.chunk_inputs import TowerInputs
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool

CPU = torch.device("cpu")
CASE = MediaCase(
    "Qwen3VLForConditionalGeneration",
    layouts=((64, *(part for _ in range(6) for part in ("i", 64))),),
    vision={
        **{"depth": 8, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32},
        **{"num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
    },
)


def towers_of(plan: StepPlan, keeps: tuple[int, ...]) -> StepPlan:
    """The plan with these images of its only document kept."""
    ((group,),) = (each.groups for each in plan.micro_batches)
    runs = [TowerRun(chunk.index, *key, keeps[key[1]]) for chunk in group.chunks for key in images_of(chunk, plan.media)]
    return replace(plan, micro_batches=(MicroBatch((replace(group, towers=tuple(runs)),)),))


def float32(medium: TowerInputs) -> TowerInputs:
    tensors = {name: each.float() if each.is_floating_point() else each for name, each in medium.tensors.items()}
    return replace(medium, tensors=tensors)


def test_graphs_that_wait_add_to_the_peak_what_is_allocated_for_them() -> None:
    model = CASE.build().float()
    rows, reader = CASE.rows(CASE.build())
    reader = replace(reader, opened=tuple(map(float32, reader.opened)))
    patch_model(model)
    spec = model_spec(model)
    spec = replace(spec, tower=trained_tower(model, spec.tower))
    (row,) = rows
    length, patches = len(row["input_ids"]), [len(each.tensors["pixel_values"]) for each in reader.opened]
    pairs = zip(row["media"], patches, strict=True)
    media = (tuple(TowerWork(item["start"], item["stop"], 1, count, item["num_features"]) for item, count in pairs),)
    cluster = ClusterSpec(num_ranks=1, ranks_per_node=1, hardware=GENERIC_GPU)
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), CPU)
    index = SequenceIndex.build(np.array([length]), length, "error")
    counted, predicted = [], []
    for keeps in ((0,) * 6, (1, 0, 1, 0, 0, 1), (1,) * 6):
        plan = towers_of(replace(plan_of([[(1, (0,))]], [length], 1), media=media), keeps)
        inputs = LongContextCollator()([PlannedDataset(rows, index, reader=reader)[PlannedStep(plan, (0,), 0)]])["chunks"]
        run = partial(executor.run, plan.for_rank(0), inputs, num_labels(rows))
        if not counted:
            # gradients are part of the states
            run()
        counted.append(measure(run)[0])
        predicted.append(evaluate_plan(plan, costs).peak_bytes[0])
    # graphs are most of what is held
    assert counted[2] > 2 * counted[0]
    assert np.diff(predicted) == pytest.approx(np.diff(counted), rel=0.05)
