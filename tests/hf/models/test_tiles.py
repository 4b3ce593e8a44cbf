"""Tiles under a policy: MLPs run in the policy's, the output head in small ones, whose logits plans count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models.tiny_models import ModelCase, build_model

from hf_longctx.plan.core import types
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.recipes.bench.one_document import PlannedDocument, document_plan, predicted_peak_bytes, replayed


def test_the_head_runs_in_small_tiles_beside_larger_ones_of_the_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "LEAST_TILE_TOKENS", 4)
    model = build_model(ModelCase())
    seen: dict[str, list[int]] = {"head": [], "mlp": []}

    def watched(name: str, forward: Any) -> Any:
        return lambda x: (seen[name].append(x.shape[1]), forward(x))[1]

    # forwards that were there before plans
    model.lm_head.forward = watched("head", model.lm_head.forward)
    model.model.layers[0].mlp.forward = watched("mlp", model.model.layers[0].mlp.forward)
    plan = document_plan(40, (replayed(),) * 2, tile_tokens=20)
    document = PlannedDocument.of(model, torch.arange(40).unsqueeze(0), plan)
    document.step()
    document.close()
    # sixteen tokens show which products gradients do not need
    assert set(seen["head"]) == {4} and set(seen["mlp"]) == {20, 16}


@pytest.mark.parametrize(("gib", "tile"), [(96, 8192), (48, 4096), (24, 2048), (16, 2048), (4, 2048)])
def test_tiles_are_as_large_as_memory_allows(gib: int, tile: int) -> None:
    byte_model = ByteModel(named_model("llama-3.1-8b", 2))
    assert byte_model.tile_tokens(gib << 30) == byte_model.budget(gib << 30, 0).tile_tokens == tile
    assert byte_model.budget(gib << 30, 0, 512).tile_tokens == 512


def test_bytes_of_the_loss_are_those_of_small_tiles() -> None:
    spec = named_model("llama-3.1-8b", 2)
    peaks = [
        predicted_peak_bytes(document_plan(8192, (replayed(),) * spec.num_layers, tile_tokens), spec)
        for tile_tokens in (2048, 8192)
    ]
    # only tiles of the MLP are larger: logits of 8,192 tokens would take ten bytes an entry more
    assert peaks[0] <= peaks[1] < peaks[0] + 4 * 8192 * spec.vocab_size
