"""Numbers of compressed keys that an index chooses (DeepSeek V4) take exactly the bytes that the memory model counts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.measures.class_sweep import patched
from helpers.models.any_model import build_any
from helpers.plans.sliced_plans import sliced_plan
from predicted.test_saved_bytes import saved_bytes

from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.runtime.execution.executor import no_mask
from hf_longctx.runtime.process_groups import GroupPool

NUM_TOKENS, FEW, MANY = 48, 2, 16
SPARSE, HEAVY, WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"


def measured(kinds: list[str], num_chosen: int) -> tuple[int, int]:
    """Bytes that the layers of a tiny model save for one document, as counted by torch and by the memory model."""
    mlps = ["moe"] * len(kinds)
    model = patched(
        build_any(
            "DeepseekV4ForCausalLM", num_hidden_layers=len(kinds), layer_types=kinds, mlp_layer_types=mlps, index_topk=num_chosen
        )
    )
    (group,) = sliced_plan([NUM_TOKENS], [[(0, 0, NUM_TOKENS)]]).micro_batches[0].groups
    context = GroupPool((1,), 1.0).context(group, group.chunks[0])
    ids = torch.arange(NUM_TOKENS).view(1, -1) % 16 + 1
    keywords = {"position_ids": torch.arange(NUM_TOKENS).view(1, -1), "use_cache": False, "longctx": context}
    found, _ = saved_bytes(model, partial(model.model, ids, no_mask(torch.device("cpu")), **keywords))
    return found, NUM_TOKENS * saved_token_bytes(model_spec(model))


@pytest.mark.wide("4")
@pytest.mark.parametrize("kinds", [[SPARSE], [SPARSE, SPARSE], [WINDOW, SPARSE, HEAVY, SPARSE]], ids=len)
def test_more_chosen_entries_take_the_bytes_that_are_counted(kinds: list[str]) -> None:
    few, many = measured(kinds, FEW), measured(kinds, MANY)
    assert many[0] - few[0] == many[1] - few[1] == 4 * (MANY - FEW) * kinds.count(SPARSE) * NUM_TOKENS


def test_other_compressed_keys_take_none() -> None:
    few, many = measured([WINDOW, HEAVY], FEW), measured([WINDOW, HEAVY], MANY)
    assert many == few
