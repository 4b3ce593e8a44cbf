"""Stages read from checkpoints: the weights of the whole model, and no more of them on a rank than its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.models.staged_models import even_ranges, family_model, random_inputs, run_pipeline
from helpers.ranks.forked import FORKED
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import core_model_loading

from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.start.stages import load_stage, local_folder


def saved(model: Any, folder: Path, shard_size: str = "20KB") -> str:
    model.save_pretrained(folder, max_shard_size=shard_size)
    return str(folder)


def stages_of(folder: str, num_stages: int, num_ranges: int = 1, **settings: Any) -> list[Any]:
    ranges = even_ranges(num_stages, num_ranges)
    return [load_stage(folder, ranges, stage, **settings) for stage in range(num_stages)]


@pytest.mark.daily("heads0-False-mistral", "heads1-True-llama", "heads2-True-llama")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("heads", [(), (1,), (0, 1)])
def test_loaded_stages_are_the_whole_model(family: str, tied: bool, heads: tuple[int, ...], tmp_path: Path) -> None:
    model = family_model(family, tied)
    ranges = even_ranges(3)
    folder = saved(model, tmp_path)
    models = stages_of(folder, 3, head_stages=heads)
    assert [stage for stage, own in enumerate(models) if "lm_head.weight" in own.state_dict()] == [*heads, 2]
    # on the first stage, a tied head is the embedding
    assert len(dict(models[0].named_parameters(remove_duplicate=False))) - len(list(models[0].parameters())) == (
        tied and 0 in heads
    )
    weights = {name: value for stage in models for name, value in stage.state_dict().items()}
    expected = model.state_dict()
    assert sorted(weights) == sorted(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    # buffers that no file holds: the angles of positions
    assert not any(tensor.is_meta for stage in models for tensor in (*stage.parameters(), *stage.buffers()))
    assert {type(stage) for stage in models} == {type(model)}
    inputs = random_inputs()
    logits, _ = run_pipeline([stage_model(stage, ranges, number, heads) for number, stage in enumerate(models)], inputs)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits, whole(input_ids=inputs.input_ids, use_cache=False).logits)


def test_stages_may_be_loaded_in_another_dtype(tmp_path: Path) -> None:
    folder = saved(family_model("llama"), tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    for stage in stages_of(folder, 2, dtype=torch.bfloat16):
        assert all(
            value.dtype == torch.bfloat16 and torch.equal(value, expected[name]) for name, value in stage.state_dict().items()
        )


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_its_own_tensors_and_no_other(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("llama", tied)
    folder = saved(model, tmp_path)
    num_read = {"elements": 0}
    read = core_model_loading._materialize_copy

    def counted(tensor: Any, *args: Any, **keywords: Any) -> Any:
        found = read(tensor, *args, **keywords)
        num_read["elements"] += found.numel()
        return found

    monkeypatch.setattr(core_model_loading, "_materialize_copy", counted)
    for stage in range(3):
        num_read["elements"] = 0
        own = load_stage(folder, even_ranges(3), stage)
        assert num_read["elements"] == sum(parameter.numel() for parameter in own.parameters())


def test_base_model_checkpoints_have_no_prefix(tmp_path: Path) -> None:
    model = family_model("llama", tied=True)
    folder = saved(model.model, tmp_path)
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert "embed_tokens.weight" in names
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    expected = model.state_dict()
    for stage in stages_of(folder, 2):
        assert all(torch.equal(value, expected[name]) for name, value in stage.state_dict().items())


def test_fused_experts_are_loaded_by_stage(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **more, pad_token_id=0))
    folder = saved(model, tmp_path)
    in_files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(re.search(r"experts\.3\.up_proj", name) for name in in_files)
    expected = model.state_dict()
    found = {}
    for stage in range(2):
        found.update(load_stage(folder, even_ranges(2, num_layers=4), stage).state_dict())
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _peak_growth(folder: str, stage: int, num_stages: int, pipe: Any) -> None:
    """Sends the most bytes that this process had more than before, as the kernel counts them."""
    torch.set_num_threads(1)
    ranges = even_ranges(num_stages, num_layers=8)
    # whatever the first load of a process takes for itself
    load_stage(f"{folder}/tiny", even_ranges(num_stages), stage)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    model = load_stage(f"{folder}/large", ranges, stage)
    pipe.send((_resident("VmHWM") - before, sum(p.numel() * 4 for p in model.parameters())))


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@pytest.mark.wide
def test_no_process_ever_holds_the_whole_model(tmp_path: Path) -> None:
    saved(family_model("llama", dtype=torch.float32), tmp_path / "tiny")
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_key_value_heads": 4, "vocab_size": 8192}
    model = family_model("llama", dtype=torch.float32, **large)
    whole_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    saved(model, tmp_path / "large", "1GB")
    ours, theirs = FORKED.Pipe()
    process = FORKED.Process(target=_peak_growth, args=(str(tmp_path), 1, 4, theirs))
    process.start()
    peak_bytes, stage_bytes = ours.recv()
    process.join()
    # a read may hold a tensor twice, as pages of the file and as a copy
    assert stage_bytes < 0.25 * whole_bytes
    assert peak_bytes < 2.2 * stage_bytes < 0.5 * whole_bytes


def test_a_name_on_the_hub_gives_the_folder_of_its_files(tmp_path: Path) -> None:
    # the hub's cache, as downloads leave it
    cache = tmp_path / "models--someone--model"
    snapshot = cache / "snapshots" / ("0" * 40)
    saved(family_model("llama"), snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(snapshot.name)
    place = {"cache_dir": str(tmp_path), "local_files_only": True}
    folder, others = local_folder("someone/model", {**place, "attn_implementation": "eager"})
    assert Path(folder) == snapshot and others == {"attn_implementation": "eager"}
    ranges = even_ranges(2)
    for stage in range(2):
        found, expected = (load_stage(each, ranges, stage).state_dict() for each in (folder, str(snapshot)))
        assert found.keys() == expected.keys() and set(found) == load_names(stage)
    with pytest.raises(ValueError, match="someone/other is not a folder, nor a checkpoint on the hub"):
        local_folder("someone/other", place)


def test_folders_that_are_no_whole_checkpoint_are_refused(tmp_path: Path) -> None:
    ranges = even_ranges(2)
    with pytest.raises(ValueError, match="is not a folder; stages"):
        load_stage("someone/model", ranges, 0)
    with pytest.raises(ValueError, match=r"has no model.safetensors"):
        load_stage(str(tmp_path), ranges, 0)
    saved(family_model("llama"), tmp_path)
    file = sorted(tmp_path.glob("model-*.safetensors"))[1]
    with safe_open(file, framework="pt") as reader:
        first = sorted(reader.keys())[0]
    tensors = load_file(file)
    save_file({name: value for name, value in tensors.items() if name != first}, file, metadata={"format": "pt"})
    stage = next(number for number in range(2) if first in load_names(number))
    with pytest.raises(ValueError, match=rf"lacks 1 weights of stage {stage} \(the first is {re.escape(first)}\)"):
        load_stage(str(tmp_path), ranges, stage)
    load_stage(str(tmp_path), ranges, 1 - stage)
    file.unlink()
    with pytest.raises(ValueError, match=rf"has no {file.name}"):
        load_stage(str(tmp_path), ranges, 1 - stage)


def load_names(stage: int) -> set[str]:
    model = family_model("llama")
    cut_model(model, even_ranges(2), stage)
    return set(model.state_dict())


def test_a_checkpoint_with_two_weights_where_the_config_ties_them_is_refused(tmp_path: Path) -> None:
    saved(family_model("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="ties the head to the embedding, but their weights differ"):
        load_stage(str(tmp_path), even_ranges(2), 1)
