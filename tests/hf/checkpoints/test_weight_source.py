"""Weights that leave for a server are those of the files that `save_pretrained` writes, whole, one at a time, adapters added."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.measures.allocations import measure
from helpers.models.tiny_models import FAMILIES, MOE_FAMILIES, OTHER_FAMILIES, ModelCase, build_model
from safetensors.torch import load_file

from hf_longctx import pack_experts
from hf_longctx.hf.checkpoints import weight_source
from hf_longctx.hf.checkpoints.weight_source import WeightInfo, WeightSource, weight_problems
from hf_longctx.hf.run.placement import Shards
from hf_longctx.runtime.parameters.sharded import shard_mesh

LORA = (("r", 2), ("lora_alpha", 8), ("target_modules", ["q_proj", "v_proj", "down_proj"]))
ENDS = (("r", 2), ("target_modules", ["q_proj"]), ("modules_to_save", ["embed_tokens", "lm_head"]))
TOKENS = (("r", 2), ("target_modules", ["q_proj"]), ("trainable_token_indices", {"embed_tokens": [1, 5, 6]}))
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# name -> model
ADAPTED: dict[str, ModelCase] = {
    "plain": ModelCase(lora=LORA),
    "dora, rank-stabilised": ModelCase(lora=(*LORA, ("use_dora", True), ("use_rslora", True))),
    "on the embedding": ModelCase(lora=(("r", 2), ("target_modules", ["embed_tokens", "k_proj"]))),
    "biases": ModelCase("qwen2", lora=(("r", 2), ("target_modules", ["q_proj"]), ("lora_bias", True))),
    "saved ends": ModelCase(lora=ENDS),
    "saved tied ends": ModelCase(tied=True, lora=(*ENDS, ("ensure_weight_tying", True))),
    "tokens": ModelCase(lora=TOKENS),
    "tokens of tied ends": ModelCase(tied=True, lora=TOKENS),
    "two active": ModelCase(lora=(*LORA, ("names", ("default", "other")), ("num_active", 2))),
    "on experts": ModelCase("qwen3_moe", lora=(("r", 2), ("target_modules", ["q_proj"]), ("target_parameters", EXPERTS))),
    "beside experts": ModelCase("qwen3_moe", lora=(("r", 2), ("target_modules", ["q_proj"]))),
}


def in_files(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def sent(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of one iteration, which keep what `metadata` says."""
    source = WeightSource(model)
    announced, pairs = source.metadata(), list(source)
    assert announced == [WeightInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]
    return dict(pairs)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES, *MOE_FAMILIES])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_server_gets_the_tensors_of_checkpoint_files(tmp_path: Path, family: str, tied: bool) -> None:
    attention = "eager" if family == "gpt_oss" else "sdpa"
    model = build_model(ModelCase(family, tied=tied, dtype=torch.float32, attention=attention))
    assert_equal(sent(model), in_files(model, tmp_path))


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_are_added_as_merging_would(tmp_path: Path, name: str) -> None:
    model = build_model(ADAPTED[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = sent(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert_equal(found, in_files(model.merge_and_unload(), tmp_path), 1e-12)


@pytest.mark.wide
def test_a_hundred_updates_leave_the_frozen_bf16_weights_alone_and_round_a_sum_once() -> None:
    model = build_model(ModelCase(lora=LORA, dtype=torch.bfloat16))
    frozen = {name: weight.clone() for name, weight in model.named_parameters() if "lora_" not in name}
    for _ in range(100):
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data += 0.01 * torch.randn_like(weight)
        found = sent(model)
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in frozen.items())
    path = "base_model.model.model.layers.1.mlp.down_proj"
    a, b = (weights[f"{path}.lora_{letter}.default.weight"].float() for letter in "AB")
    expected = (weights[f"{path}.base_layer.weight"].float() + 4 * (b @ a)).bfloat16()
    assert torch.equal(found["model.layers.1.mlp.down_proj.weight"], expected)


def gathered(case: ModelCase, shard_ranks: int, on_host: bool) -> dict[str, torch.Tensor]:
    """Weights of a sharded model on this rank; a forward before may have left some whole."""
    model: Any = build_model(replace(case, spread=False))
    mesh = shard_mesh("cpu", shard_ranks, 60.0)
    Shards(mesh, torch.device("cpu"), True, spreads_experts=case.spread, layers_on_host=on_host).divide(model)
    model.requires_grad_(False)
    if not case.spread and not on_host:
        with torch.no_grad():
            model(input_ids=torch.arange(6)[None])
    return sent(model)


@pytest.mark.daily("adapters, on the host", "spread experts")
@pytest.mark.parametrize(
    "num_ranks,case,shard_ranks,on_host",
    [
        (2, ModelCase(tied=True), 2, False),
        (2, ModelCase(lora=LORA), 2, True),
        (2, ModelCase("mixtral"), 2, False),
        (2, ModelCase("qwen3_moe", spread=True), 2, False),
        (4, ModelCase(lora=TOKENS), 2, False),
    ],
    ids=["tied", "adapters, on the host", "experts", "spread experts", "two copies"],
)
def test_shards_are_sent_as_the_whole_model(
    ranks, tmp_path: Path, num_ranks: int, case: ModelCase, shard_ranks: int, on_host: bool
) -> None:
    whole = build_model(replace(case, spread=False))
    expected = in_files(whole.merge_and_unload() if case.lora else whole, tmp_path)
    for found in ranks(num_ranks).run(gathered, case, shard_ranks, on_host):
        assert_equal(found, expected, 1e-12 if case.lora else 0.0)


def gathered_bytes(family: str) -> tuple[int, int, int]:
    """Most bytes of tensors made during a walk, and bytes of the largest tensor and of all of them."""
    model = build_model(ModelCase(family, num_heads=16, num_layers=8, dtype=torch.float32))
    Shards(shard_mesh("cpu", dist.get_world_size(), 60.0), torch.device("cpu"), True).divide(model)
    source = WeightSource(model)
    peak, _, sizes = measure(lambda: [tensor.nbytes for _, tensor in source])
    return peak, max(value.numel() * value.element_size() for value in model.parameters()), sum(sizes)


@pytest.mark.daily("llama")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_one_weight_is_whole_at_a_time(ranks, family: str) -> None:
    for peak, largest, total in ranks(2).run(gathered_bytes, family):
        # pieces of the ranks, the whole, and the tensors of the file; the one before is still with the reader
        assert peak <= 4 * largest + 2**16 < total, (peak, largest, total)


def test_what_cannot_be_sent_one_at_a_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one_end = build_model(ModelCase(tied=True, lora=(("r", 2), ("target_modules", ["lm_head"]))))
    (problem,) = weight_problems(one_end)
    assert "is one tied weight of embedding and head (tie_word_embeddings) with an adapter on one of them" in problem
    with pytest.raises(ValueError, match="one tied weight"):
        WeightSource(one_end)
    model = build_model(ModelCase())
    with monkeypatch.context() as patched:
        patched.setattr(weight_source, "groups_in_files", lambda *_: [])
        (problem,) = weight_problems(model)
    assert "only all together" in problem
    experts = build_model(ModelCase("qwen3_moe", dtype=torch.float32))
    pack_experts(experts, "nf4")
    (problem,) = weight_problems(experts)
    assert "are packed into four or eight bits" in problem
