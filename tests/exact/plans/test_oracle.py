"""Compares with an outside oracle: DeepSpeed's Ulysses for transformers gives the same loss and gradients on one document.

DeepSpeed is not a dependency of the package or of its tests: CI installs it for this file; elsewhere the file is skipped.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.models.reference import TOLERANCE, random_rows, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.ranks.rank_pool import RankPool
from helpers.ranks.rank_steps import step_on_rank

from hf_longctx.plan.core.serialize import plan_to_json

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed (pip install deepspeed)"),
]
LENGTH = 48


def deepspeed_step(case: ModelCase, row: dict[str, list[int]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one document that two ranks share under DeepSpeed, summed over both."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # without a compiler, use gloo in place of DeepSpeed's own collectives in shared memory
    deepspeed.ops.__compatible_ops__.clear()
    deepspeed.init_distributed("gloo", verbose=False)
    model, rank, half = build_model(case), dist.get_rank(), LENGTH // 2
    # DeepSpeed replaces sdpa for the whole process
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", sequence_parallel_size=2, micro_batch_size=1)
    calls = []
    replaced = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda *args, **kwargs: calls.append(1) or replaced(*args, **kwargs)
    cut = slice(rank * half, (rank + 1) * half)
    shift_labels = torch.tensor([*row["labels"][1:], -100])[cut]
    positions = torch.arange(LENGTH)[None, cut]
    logits = model(input_ids=torch.tensor([row["input_ids"]])[:, cut], position_ids=positions, use_cache=False).logits[0]
    count = sum(label != -100 for label in row["labels"][1:])
    loss = F.cross_entropy(logits, shift_labels, ignore_index=-100, reduction="sum") / count
    loss.backward()
    assert len(calls) == model.config.num_hidden_layers
    gradients = {name: p.grad for name, p in model.named_parameters()}
    total = loss.detach()
    for tensor in (total, *gradients.values()):
        dist.all_reduce(tensor)
    return float(total), gradients


@pytest.mark.parametrize("family,num_kv_heads", [("llama", 2), ("llama", 4), ("qwen3", 2), ("mistral", 1)])
def test_deepspeed_finds_the_same_loss_and_gradients(ranks, family: str, num_kv_heads: int) -> None:
    case = ModelCase(family, num_kv_heads=num_kv_heads, promoted=True)
    rows = random_rows([LENGTH])
    # a pool of its own, since DeepSpeed changes its processes
    pool = RankPool(2)
    try:
        expected_loss, expected = pool.run(deepspeed_step, case, rows[0])[0]
    finally:
        pool.close()
    for ulysses in (2, 1):
        plan = plan_to_json(plan_of([[(2, (0,))]], [LENGTH], 2, ulysses))
        for loss, gradients in ranks(2).run(step_on_rank, case, plan, rows):
            assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
            assert gradients.keys() == expected.keys()
            assert max(relative_error(gradients[name], expected[name]) for name in expected) <= TOLERANCE
