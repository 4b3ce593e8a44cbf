"""A training with images in rows gives the weights of plain transformers, and checkpoints have the processor."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from helpers.models.any_model import build_any, wide_floats
from helpers.models.media_rows import CASES
from helpers.models.reference import relative_error
from helpers.models.tiny_processors import chat, file_of, picture, tiny_processor
from helpers.plans.layouts import tiny_costs
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import training_arguments
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from hf_longctx import LongContextConfig, LongContextTrainer, tokenise_chat
from hf_longctx.families.registry import FAMILIES, family_of
from hf_longctx.hf.data.media.images import open_image
from hf_longctx.hf.data.media.processors import MediaTokens
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.media import token_types_name, tower_arguments
from hf_longctx.hf.models.towers import tower_parameters
from hf_longctx.hf.rules.media import _both_ways_problem, media_problems
from hf_longctx.hf.run import sets
from hf_longctx.hf.trainer import replay, row_scores
from hf_longctx.plan.core.settings import PlannerConfig

SETTINGS = LongContextConfig(tokens_per_rank=256, report_steps=False, timeline_steps=0)
STEPS: dict[str, Any] = {
    **{"max_steps": 2, "per_device_train_batch_size": 4, "max_grad_norm": 0.0, "warmup_steps": 0},
    **{"lr_scheduler_type": "constant", "save_strategy": "no"},
}
VISION = {"patch_size": 4, "spatial_merge_size": 2, "num_position_embeddings": 16, "in_channels": 3}
IMAGE = {"type": "image"}


def row_of(number: int, *parts: Any) -> dict[str, Any]:
    images = [file_of(picture(40 + 8 * number, 28 + 16 * place, place)) for place in range(parts.count(IMAGE))]
    return {"messages": chat(*parts, answer="it is an answer to a question"), "images": images}


def rows_and_processor(folder: str = "qwen3_vl") -> tuple[datasets.Dataset, Any]:
    processor = tiny_processor(folder)
    rows = [
        *(row_of(0, IMAGE, "what is this?"), row_of(1, "one two", IMAGE, "and", IMAGE, "said hello"), row_of(2, "the cat sat")),
        row_of(3, "what is this?", IMAGE),
    ]
    return tokenise_chat(datasets.Dataset.from_list(rows), processor), processor


def qwen3_vl(processor: Any, **changes: Any) -> Any:
    tokenizer = processor.tokenizer
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>"}
    tokens = {field: tokenizer.convert_tokens_to_ids(name) for field, name in names.items()}
    text = {"num_hidden_layers": 3, "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    settings = {"vision_config": VISION, "text_config": text, **tokens, "vision_end_token_id": 0} | changes
    return build_any("Qwen3VLForConditionalGeneration", "sdpa", **settings)


def gemma3(processor: Any, **changes: Any) -> Any:
    tokenizer = processor.tokenizer
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "sliding_window": 11}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    settings = {"text_config": text, "mm_tokens_per_image": 16, "image_token_id": MediaTokens(processor).feature} | changes
    settings["vision_config"] = CASES["Gemma3ForConditionalGeneration"][0]["vision_config"]
    return build_any("Gemma3ForConditionalGeneration", "sdpa", **settings)


MAKERS = {"qwen3_vl": qwen3_vl, "gemma3": gemma3}


def plain_training(model: Any, rows: Any, processor: Any) -> dict[str, torch.Tensor]:
    """The weights after two steps of plain transformers, one document at a time, with torch's AdamW on all trained weights."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decay, rest = ([p for p in trained if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    with wide_floats():
        for _ in range(2):
            optimizer.zero_grad()
            plain_loss(model, rows, processor).backward()
            optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain_loss(model: Any, rows: Any, processor: Any) -> torch.Tensor:
    """The loss of plain transformers on rows, one document at a time."""
    count = sum(label != -100 for row in rows for label in row["labels"][1:])
    losses, tokens = [], MediaTokens(processor)
    with wide_floats():
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            inputs: dict[str, Any] = {}
            if row["media_files"]:
                images = [open_image(file["path"], file["bytes"], "row") for file in row["media_files"]]
                found = processor.image_processor(images, return_tensors="pt")
                inputs = {name: each for name, each in found.items() if name in tower_arguments(model, "image")}
                inputs[token_types_name(model)] = (ids == tokens.feature).long()
            logits = model(input_ids=ids, **inputs, use_cache=False).logits[0, :-1].double()
            losses.append(F.cross_entropy(logits, torch.tensor(row["labels"][1:]), ignore_index=-100, reduction="sum") / count)
    return torch.stack(losses).sum()


@pytest.mark.wide
@pytest.mark.parametrize("frozen", [False, True])
def test_training_is_that_of_plain_transformers_and_checkpoints_have_the_processor(
    frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, processor = rows_and_processor()
    plain, model = (qwen3_vl(processor) for _ in range(2))
    for each in (plain, model):
        for parameter in tower_parameters(each) if frozen else ():
            parameter.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = plain_training(plain, rows, processor)
    with wide_floats():
        trainer = LongContextTrainer(
            model=model,
            args=training_arguments(str(tmp_path), **STEPS),
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=processor,
            longctx_config=SETTINGS,
        )
        source, planned = trainer.longctx_run.source, []
        solve = source.solve
        monkeypatch.setattr(source, "solve", lambda *given: planned.append(solve(*given)) or planned[-1])
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    # plans count what towers read, and states of trained ones
    tower = source.costs.model.tower
    assert tower.trained_parameters == (0 if frozen else sum(parameter.numel() for parameter in tower_parameters(model)))
    works = [each for own in planned[0].media for each in own]
    grids = [item["grid"] for row in rows for item in row["media"]]
    assert sorted(each.patches for each in works) == sorted(math.prod(grid) for grid in grids)
    assert [bool(own) for own in planned[0].media].count(True) == 3
    after = dict(model.named_parameters())
    assert max(relative_error(after[name], expected[name]) for name in after) <= 1e-9
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert any("visual" in name for name in changed) != frozen
    assert loss == pytest.approx(float(plain_loss(plain, rows, processor)), rel=1e-9)
    trainer.save_model(str(tmp_path / "saved"))
    assert {"tokenizer.json", "processor_config.json"} <= {path.name for path in (tmp_path / "saved").iterdir()}


def test_rows_with_images_are_not_cut(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    longest = max(map(len, rows["input_ids"]))
    with pytest.raises(ValueError, match=f"row 1 has {longest} tokens, .* rows with images are not cut so far; raise max_length"):
        trainer_with(qwen3_vl(processor), processor, rows, tmp_path, max_length=longest - 1, long_sequences="split")


def training_on_rank(folder: str, parameters: str, kind: str = "qwen3_vl") -> dict[str, torch.Tensor]:
    """Trains two steps on this rank of a pool; returns the whole weights."""
    rows, processor = rows_and_processor(kind)
    model = MAKERS[kind](processor)
    trainer = trainer_with(model, processor, rows, Path(folder), per_device=2, parameters=parameters)
    with wide_floats():
        trainer.train()
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.wide
@pytest.mark.parametrize("parameters", ["sharded", "replicated"])
def test_two_ranks_train_as_plain_transformers_with_whole_weights_and_in_shards(
    parameters: str, ranks: Any, tmp_path: Path
) -> None:
    rows, processor = rows_and_processor()
    expected = plain_training(qwen3_vl(processor), rows, processor)
    for after in ranks(2).run(training_on_rank, str(tmp_path), parameters):
        assert after.keys() == expected.keys()
        assert max(relative_error(after[name], expected[name]) for name in after) <= 1e-9


FOUR_LAYERS = {"num_hidden_layers": 4, "max_position_embeddings": 512}


def deep_model(processor: Any) -> Any:
    return qwen3_vl(processor, text_config=FOUR_LAYERS | {"vocab_size": len(processor.tokenizer)})


def staged_training(folder: str, parameters: str, resume: str | None) -> dict[str, Any]:
    """Trains two steps on two stages, perhaps from a checkpoint; returns losses, and the loss of an evaluation of all rows."""
    rows, processor = rows_and_processor()
    saves = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    ways = {"stages": 2, "parameters": parameters}
    trainer = trainer_with(deep_model(processor), processor, rows, Path(folder), 4 // dist.get_world_size(), saves, **ways)
    with wide_floats():
        trainer.train(resume_from_checkpoint=resume)
        loss = trainer.evaluate(rows)["eval_loss"]
    trainer.save_model(str(Path(folder, "saved")))
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], "evaluated": loss}


@pytest.mark.wide
@pytest.mark.parametrize("num_ranks, parameters", [(2, "replicated"), (4, "replicated"), (4, "sharded")])
def test_stages_train_as_plain_transformers_resume_and_save_the_whole_model_with_its_processor(
    num_ranks: int, parameters: str, ranks: Any, tmp_path: Path
) -> None:
    rows, processor = rows_and_processor()
    expected = plain_training(deep_model(processor), rows, processor)
    resumed = str(tmp_path / "checkpoint-1")
    first = ranks(num_ranks).run(staged_training, str(tmp_path), parameters, None)
    assert {"tokenizer.json", "processor_config.json"} <= {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    for found in (first, ranks(num_ranks).run(staged_training, str(tmp_path), parameters, resumed)):
        assert all(each == first[0] for each in found)
        model = deep_model(processor)
        saved = type(model).from_pretrained(tmp_path / "saved", dtype=torch.float64)
        weights = dict(saved.named_parameters())
        assert weights.keys() == expected.keys()
        assert max(relative_error(weights[name], expected[name]) for name in weights) <= 1e-9
        assert {"tokenizer.json", "processor_config.json"} <= {path.name for path in (tmp_path / "saved").iterdir()}


def refused_stages(folder: str, num_layers: int, lends: bool) -> str:
    rows, processor = rows_and_processor()
    text = FOUR_LAYERS | {"vocab_size": len(processor.tokenizer), "num_hidden_layers": num_layers}
    model = qwen3_vl(processor, text_config=text)
    ways = {"stages": 2, "lend_stages": lends, "parameters": "replicated"}
    with pytest.raises(ValueError) as refused:
        trainer_with(with_lora(model) if lends else model, processor, rows, Path(folder), 2, **ways)
    return str(refused.value)


def test_stages_without_the_layers_after_which_features_are_added_and_lent_ones_are_refused(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(2).run(refused_stages, str(tmp_path), 2, False):
        assert "Qwen3VLForConditionalGeneration adds features of images after its first 2 layers, but the first stage" in message
    for message in ranks(2).run(refused_stages, str(tmp_path), 4, True):
        assert "rows have images, but stages that lend their ranks have no towers for them; set lend_stages=False" in message


def test_images_that_see_themselves_both_ways_are_trained_as_in_plain_transformers(tmp_path: Path) -> None:
    rows, processor = rows_and_processor("gemma3")
    plain, model = (gemma3(processor) for _ in range(2))
    expected = plain_training(plain, rows, processor)
    with wide_floats():
        trainer = trainer_with(model, processor, rows, tmp_path)
        trainer.train()
        loss = trainer.evaluate(rows)["eval_loss"]
    after = dict(model.named_parameters())
    assert max(relative_error(after[name], expected[name]) for name in expected) <= 1e-9
    assert loss == pytest.approx(float(plain_loss(plain, rows, processor)), rel=1e-9)


@pytest.mark.daily("sharded")
@pytest.mark.parametrize("parameters", ["sharded", "replicated"])
def test_two_ranks_train_images_that_see_themselves_both_ways(parameters: str, ranks: Any, tmp_path: Path) -> None:
    rows, processor = rows_and_processor("gemma3")
    expected = plain_training(gemma3(processor), rows, processor)
    for after in ranks(2).run(training_on_rank, str(tmp_path), parameters, "gemma3"):
        # no loss reaches the pooling head; shards give it gradients of zero, by which it decays
        after = {name: weight for name, weight in after.items() if not re.search(r"vision.*head", name)}
        assert max(relative_error(after[name], expected[name]) for name in after) <= 1e-9


def test_rings_are_refused_by_name_for_images_that_see_themselves_both_ways(tmp_path: Path) -> None:
    rows, processor = rows_and_processor("gemma3")
    said = r"images whose tokens see each other both ways in Gemma3.*but method='ring'; leave it out"
    with pytest.raises(ValueError, match=said):
        trainer_with(gemma3(processor), processor, rows, tmp_path, method="ring")
    # rows of text alone may run in rings
    text = rows.filter(lambda row: not row["media"])
    trainer_with(gemma3(processor), processor, text, tmp_path, method="ring")


def test_an_image_for_which_no_plan_has_room_is_refused_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no room for a block")

    rows, processor = rows_and_processor("gemma3")
    monkeypatch.setattr(sets, "plan_step", refuse)
    said = "row 1 has images whose tokens see each other both ways, and cannot be planned alone: no room for a block"
    with pytest.raises(ValueError, match=said):
        trainer_with(gemma3(processor), processor, rows, tmp_path)


# one block of tokens for a whole row, features in many layers, discrete tokens, and attention across
WITHOUT_IMAGES = (
    *("Gemma3n", "Granite4Vision", "GraniteDocling", "Molmo2", "PaliGemma", "Emu3", "Apertus1p5", "Chameleon", "Janus"),
    "Mllama",
)


def test_classes_whose_images_were_not_tested_have_none() -> None:
    families = [family_of(f"{name}ForConditionalGeneration") for name in WITHOUT_IMAGES]
    assert all(family.folder and not family.media for family in families)
    # no class has sound
    assert {kind for family in FAMILIES for kind in family.media} == {"image", "video"}
    model = build_any("PaliGemmaForConditionalGeneration")
    (problem,) = media_problems(ModelFacts.of(model), None, None)  # type: ignore[arg-type]
    assert "rows have images, but PaliGemmaForConditionalGeneration trains rows of text alone; use a class that docs/" in problem


def test_images_that_come_late_to_shards_of_text_and_rows_for_scores_and_replays_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: Any = SimpleNamespace(_reads_media=False, setup=SimpleNamespace(costs=SimpleNamespace(parameters="sharded")))
    (problem,) = sets.SequenceSets._late_media_problems(late, "eval_dataset")
    assert "has rows with images, but the sets at the start of the run had none, and its shards are made for text" in problem
    late._reads_media = True
    assert not sets.SequenceSets._late_media_problems(late, "eval_dataset")
    rows, processor = rows_and_processor()
    with pytest.raises(ValueError, match="row 0 has images, which the model of a stock trainer does not get here"):
        row_scores.plain_scores(qwen3_vl(processor), rows, 0, 1, torch.device("cpu"))
    monkeypatch.setattr(replay, "_read", lambda _: {"has_media": True})
    with pytest.raises(ValueError, match="holds a step of rows with images, whose pixels are not saved"):
        replay.replay(tmp_path)


def refused_gemma_stages(folder: str) -> str:
    rows, processor = rows_and_processor("gemma3")
    with pytest.raises(ValueError) as refused:
        trainer_with(gemma3(processor), processor, rows, Path(folder), 2, stages=2, parameters="replicated")
    return str(refused.value)


def test_stages_are_refused_by_name_for_images_that_see_themselves_both_ways(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(2).run(refused_gemma_stages, str(tmp_path)):
        assert "both ways in Gemma3ForConditionalGeneration, which 2 stages do not train so far; set stages=1" in message


def test_degrees_above_the_heads_are_refused_where_images_see_themselves_both_ways() -> None:
    costs = tiny_costs(8)
    setup = SimpleNamespace(costs=costs, planner=PlannerConfig(64, (1, 2, 8)), num_stages=1)
    heads = costs.model.num_heads
    assert heads < 8
    problem = _both_ways_problem("Gemma3ForConditionalGeneration", setup)
    assert f"groups of 8 ranks cannot divide {heads} heads; set degrees=(1, 2)" in problem


def with_lora(model: Any) -> Any:
    torch.manual_seed(5)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.1
    return adapted


@pytest.mark.wide
def test_low_rank_adapters_on_towers_are_trained_as_in_plain_transformers(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    plain, model = (with_lora(qwen3_vl(processor)) for _ in range(2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = plain_training(plain, rows, processor)
    with wide_floats():
        trainer_with(model, processor, rows, tmp_path).train()
    after = dict(model.named_parameters())
    trained = [name for name, p in after.items() if p.requires_grad]
    assert any("visual" in name for name in trained)
    assert any("language_model" in name for name in trained)
    assert not [name for name in trained if torch.equal(after[name], before[name])]
    assert max(relative_error(after[name], expected[name]) for name in trained) <= 1e-9


def trainer_with(
    model: Any, processor: Any, rows: Any, folder: Path, per_device: int = 4, saves: Any = None, **config: Any
) -> LongContextTrainer:
    """saves: further training arguments. config: settings of the plans."""
    settings = {"tokens_per_rank": 256, "report_steps": False, "timeline_steps": 0} | config
    return LongContextTrainer(
        model=model,
        args=training_arguments(str(folder), **STEPS | {"per_device_train_batch_size": per_device} | (saves or {})),
        train_dataset=rows,
        processing_class=processor,
        longctx_config=LongContextConfig(**settings),
    )


def test_rows_with_images_are_refused_without_processor_and_for_classes_without_images(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    model = qwen3_vl(processor)
    with pytest.raises(ValueError, match="rows have images, but processing_class is TokenizersBackend, which reads text alone"):
        trainer_with(model, processor.tokenizer, rows, tmp_path)
    with pytest.raises(
        ValueError, match=r"images are token \d+ for the processor \(Glm4vProcessor\), but token \d+ for the model"
    ):
        trainer_with(model, tiny_processor("glm4v"), rows, tmp_path)
    with pytest.raises(
        ValueError, match="row 0 has 0 tokens that stand for images, sound or video, and its column 'media' places"
    ):
        trainer_with(qwen3_vl(processor, image_token_id=5), processor, rows, tmp_path)
    text = build_any("Qwen3ForCausalLM", "sdpa", vocab_size=len(processor.tokenizer), max_position_embeddings=512)
    with pytest.raises(ValueError, match="row 0 has images, but the model reads text alone; use a multimodal model"):
        trainer_with(text, processor, rows, tmp_path)
    sizes, token = {"vocab_size": len(processor.tokenizer)}, MediaTokens(processor).feature
    other = build_any("Cohere2VisionForConditionalGeneration", "sdpa", text_config=sizes, image_token_id=token)
    with pytest.raises(ValueError, match="rows have images, but Cohere2VisionForConditionalGeneration trains rows of text alone"):
        trainer_with(other, processor, rows, tmp_path)


def test_rows_with_images_are_never_cut(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    longest = max(len(row["input_ids"]) for row in rows)
    number = [len(row["input_ids"]) for row in rows].index(longest)
    for way in ("truncate", "split"):
        with pytest.raises(
            ValueError, match=rf"row {number} has {longest} tokens, \d+ of them for images, above the limit of 40"
        ):
            trainer_with(qwen3_vl(processor), processor, rows, tmp_path, max_length=40, long_sequences=way)


def test_an_image_that_changes_or_disappears_ends_the_training_before_the_step(tmp_path: Path) -> None:
    processor = tiny_processor("qwen3_vl")
    picture(40, 28).save(tmp_path / "a.png")
    row = {"messages": chat({**IMAGE, "path": str(tmp_path / "a.png")}, "what?")}
    rows = tokenise_chat(datasets.Dataset.from_list([row]), processor)
    trainer = trainer_with(qwen3_vl(processor), processor, rows, tmp_path / "out")
    picture(96, 28).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"train_dataset row 0 image 0 \(96 x 28 pixels\) takes \d+ tokens now, but its row has"):
        trainer.train()
    (tmp_path / "a.png").unlink()
    with pytest.raises(ValueError, match=r"train_dataset row 0 image 0 \(.*a.png\) cannot be read \(FileNotFoundError"):
        trainer.train()


def test_towers_that_drop_at_random_are_refused_by_name(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    model = qwen3_vl(processor)
    block = model.model.visual.blocks[0]
    block.attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=re.escape("towers drop at random in training (model.visual.blocks.0.attn (0.1))")):
        trainer_with(model, processor, rows, tmp_path)


def fault_on_rank(folder: str) -> tuple[str, int, bool]:
    """Trains with images in files of this rank's own folder, where those of rank 1 disappear.

    Returns this rank's error, its steps, and whether its weights are those before.
    """
    processor, rank = tiny_processor("qwen3_vl"), dist.get_rank()
    own, back = Path(folder, str(rank)), Path.cwd()
    own.mkdir()
    os.chdir(own)
    try:
        for number in range(2):
            picture(40, 28, number).save(f"{number}.png")
        messages = [chat({**IMAGE, "path": f"{number}.png"}, "what is this?") for number in range(2)]
        rows = tokenise_chat(datasets.Dataset.from_list([{"messages": each} for each in messages]), processor)
        model = qwen3_vl(processor)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer = trainer_with(model, processor, rows, own / "out", per_device=1)
        for file in own.glob("*.png") if rank == 1 else ():
            file.unlink()
        with pytest.raises(ValueError) as refused:
            trainer.train()
        unchanged = all(torch.equal(whole(p.detach()), before[name]) for name, p in model.named_parameters())
        return str(refused.value), trainer.state.global_step, unchanged
    finally:
        os.chdir(back)


@pytest.mark.wide
def test_missing_images_on_one_rank_end_both_before_the_step_with_row_and_remedy(ranks: Any, tmp_path: Path) -> None:
    said = (
        r"step 1 cannot run.*train_dataset row \d image 0 \(\d.png\) cannot be read \(FileNotFoundError.*; correct the file, or"
    )
    for message, num_steps, unchanged in ranks(2).run(fault_on_rank, str(tmp_path)):
        assert re.search(said, message, re.DOTALL), message
        assert num_steps == 0
        assert unchanged


@pytest.mark.wide
def test_a_training_with_images_that_resumes_inside_an_epoch_has_the_weights_of_one_that_ran_through(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()

    def trained(resume: str | None) -> Any:
        model = qwen3_vl(processor)
        # two rows in a step, so that an epoch has two steps
        saves = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
        trainer = trainer_with(model, processor, rows, tmp_path, per_device=2, saves=saves)
        trainer.train(resume_from_checkpoint=resume)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}

    losses, expected = trained(None)
    assert {"tokenizer.json", "processor_config.json"} <= {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    for step in (1, 3):
        found, weights = trained(str(tmp_path / f"checkpoint-{step}"))
        assert found == losses
        assert len(losses) == 4
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
