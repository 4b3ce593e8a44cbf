"""The byte model of stages against torch's own record of allocations, on gloo ranks: books exactly, peaks within 7 %."""

from __future__ import annotations

import pytest
from helpers.measures.stage_memory import stage_peak_on_rank
from helpers.models.reference import random_rows
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import num_policies, offloading, with_policies
from helpers.plans.sliced_plans import cut

from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.types import ActivationPolicy
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.stage import message_bytes

SPEC = ModelSpec(4, 64, 176, 4, 2, 16, 64, 8192)
WHOLE = [[(sequence, 0, 512)] for sequence in range(4)]
SLICED = [[span] for sequence in range(2) for span in cut(sequence, [512, 512])]

# lengths, chunks, parts of a stage, policy of every layer
CASES = {
    "whole": ([512] * 4, WHOLE, 1, None),
    "slices": ([1024, 512], [*([span] for span in cut(0, [256] * 4)), [(1, 0, 512)]], 1, None),
    "parts": ([512] * 4, WHOLE, 2, None),
    "slices-on-parts": ([1024] * 2, SLICED, 2, None),
    "recomputed": ([512] * 4, WHOLE, 1, offloading()),
    "host": ([512] * 4, WHOLE, 1, offloading(host=1.0, recompute=0.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_hold_and_work_with_what_is_predicted(ranks, name: str) -> None:
    lengths, chunks, num_parts, policy = CASES[name]
    plan = pipeline_plan(lengths, [[(1, chunks)]], 2, "interleaved" if num_parts > 1 else "1f1b", 4, num_parts)
    if policy is not None:
        plan = with_policies(plan, [ActivationPolicy(0, 0, (policy, policy))] * num_policies(plan))
    rows = random_rows(lengths)
    for row in rows:
        row["input_ids"], row["labels"] = ([token % SPEC.vocab_size for token in row[key]] for key in ("input_ids", "labels"))
    found = ranks(2).run(stage_peak_on_rank, SPEC, plan_to_json(plan), rows)
    (group,) = plan.micro_batches[0].groups
    for (peak, memory), stage in zip(found, group.stages, strict=True):
        predicted = ByteModel(SPEC).moments(group, stage, tiles_loss=False).most
        assert predicted.book == memory.kv_book
        assert predicted.host == memory.host
        messages = message_bytes(SPEC, stage, 2, max(chunk.num_tokens for chunk in group.chunks))
        assert predicted.peak + messages == pytest.approx(peak, rel=0.07)
