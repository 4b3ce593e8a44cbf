"""`hf-longctx plan --tokenizer`: columns of text and messages have the lengths that training would give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers.models.chats import conversation, word_tokenizer
from helpers.models.tiny_processors import picture, tiny_processor
from transformers import PreTrainedTokenizerFast

from hf_longctx import tokenise_chat
from hf_longctx.cli.main import main
from hf_longctx.cli.plan import TokenCounter
from hf_longctx.hf.data.tokenise import tokenise_text
from hf_longctx.plan.core.serialize import plan_from_json
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.sim.workloads import read_workload

MACHINE = ["--model", "llama-3.2-1b", "--gpus", "8", "--hardware", "h100", "--steps", "1", "--json"]
ROWS: list[dict[str, Any]] = [
    {"text": "the cat sat on the mat", "messages": conversation("what is this?", "it is an answer to a question")},
    {
        "text": "one two three four " * 30,
        "messages": conversation("hello", "to you " * 40, "the cat", "said hello", system="one"),
    },
    {"text": "hello", "messages": conversation("what is it?", "the mat")},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> tuple[str, PreTrainedTokenizerFast]:
    """A tokenizer with a chat template, and the folder in which it is saved."""
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    word_tokenizer().save_pretrained(folder)
    return folder, word_tokenizer()


def written(folder: Path, form: str) -> str:
    dataset = datasets.Dataset.from_list(ROWS)
    path = folder / f"rows.{form}"
    if form == "parquet":
        dataset.to_parquet(path)
    elif form == "csv":
        dataset.remove_columns("messages").to_csv(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.mark.parametrize(("form", "column"), [("jsonl", "messages"), ("parquet", "messages"), ("jsonl", "text"), ("csv", "text")])
def test_lengths_are_those_of_training(tokenizer, tmp_path: Path, form: str, column: str) -> None:
    folder, loaded = tokenizer
    tokenise = tokenise_chat if column == "messages" else tokenise_text
    expected = sorted(len(ids) for ids in tokenise(datasets.Dataset.from_list(ROWS), loaded)["input_ids"])
    workload = read_workload(f"{written(tmp_path, form)}:{column}", count_tokens=TokenCounter(folder))
    assert [length for length, count in zip(workload.lengths, workload.counts, strict=True) for _ in range(count)] == expected


@pytest.mark.wide
def test_the_command_counts_tokens_of_messages_and_not_messages(tokenizer, tmp_path: Path, capsys) -> None:
    file = f"{written(tmp_path, 'jsonl')}:messages"
    assert main(["plan", *MACHINE, "--lengths", file]) == 1
    assert "line 1: column 'messages' holds conversations" in (error := capsys.readouterr().err) and "--tokenizer" in error
    assert main(["plan", *MACHINE, "--lengths", file, "--tokenizer", tokenizer[0]]) == 0
    plan = plan_from_json(json.dumps(json.loads(capsys.readouterr().out)["plan"]))
    # the longest conversation says 80 words in its first answer
    assert max(validate_plan(plan).lengths) > 80


BAD = {
    "no such folder": (["--tokenizer", "nowhere/tokenizer"], "messages", "--tokenizer 'nowhere/tokenizer' cannot be loaded"),
    "no template": (["--tokenizer", "bytes"], "messages", "line 1: a conversation, but the tokenizer has no chat template"),
    "nothing to count": (["--tokenizer", "bytes"], "", "--tokenizer has no effect"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_tokenizer_that_cannot_count_is_refused_in_one_line(tmp_path: Path, capsys, name: str) -> None:
    words, column, message = BAD[name]
    file = f"{written(tmp_path, 'jsonl')}:{column}" if column else "lognormal:6,1"
    assert main(["plan", *MACHINE, "--lengths", file, *words]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_conversations_with_images_have_the_lengths_of_training(form: str, tmp_path: Path) -> None:
    processor = tiny_processor("llava")
    processor.save_pretrained(tmp_path / "model")
    picture(40, 28).save(tmp_path / "a.png")
    image = {"type": "image", "text": None}
    said = [{"type": "text", "text": "what is this?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "one two"}]}
    rows = [
        {"messages": [{"role": "user", "content": [image, *said]}, answer], "images": [str(tmp_path / "a.png")]},
        {"messages": [{"role": "user", "content": said}, answer], "images": []},
    ]
    expected = [len(ids) for ids in tokenise_chat(datasets.Dataset.from_list(rows), processor)["input_ids"]]
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = read_workload(f"{path}:messages", count_tokens=TokenCounter(str(tmp_path / "model")))
    assert sorted(workload.lengths) == sorted(expected)
    assert max(expected) - min(expected) == 16


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_texts_beside_images_are_refused_by_row(form: str, tmp_path: Path) -> None:
    rows = [{"text": "one two", "images": []}, {"text": "what is this?", "images": ["a.png"]}]
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        ValueError, match=r"(line 2|row 1): a text beside 'images', .* name a column of messages, or one of token ids"
    ):
        read_workload(f"{path}:text", count_tokens=TokenCounter("bytes"))


def test_conversations_with_images_need_a_processor(tokenizer, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(ValueError, match=r"line 1: a conversation with images, whose tokens .* cannot count \("):
        read_workload(f"{tmp_path / 'rows.jsonl'}:messages", count_tokens=TokenCounter(tokenizer[0]))


def test_the_command_counts_towers_of_conversations_with_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_processor("llava").save_pretrained(tmp_path / "processor")
    picture(40, 28).save(tmp_path / "a.png")
    said = [{"type": "image", "path": str(tmp_path / "a.png")}, {"type": "text", "text": "what is this?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "one two"}]}
    rows = [{"messages": [{"role": "user", "content": content}, answer]} for content in (said, said[1:])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    text = sizes | {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 200, "max_position_embeddings": 4096}
    vision = sizes | {"model_type": "clip_vision_model", "num_hidden_layers": 8, "image_size": 16, "patch_size": 4}
    config = {"model_type": "llava", "text_config": text, "vision_config": vision}
    words = ["--gpus", "1", "--hardware", "h100", "--global-batch", "2", "--steps", "1"]
    words += ["--lengths", f"{tmp_path / 'rows.jsonl'}:messages", "--tokenizer", str(tmp_path / "processor")]
    seconds = []
    for name, each in (("model", config), ("text", text)):
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
        assert main(["plan", "--model", str(tmp_path / f"{name}.json"), *words, "--json"]) == 0
        plan = plan_from_json(json.dumps(json.loads(capsys.readouterr().out)["plan"]))
        seconds.append(plan.estimate.step_s)
        assert [each[2:] for own in plan.media for each in own] == ([(1, 16, 16)] if name == "model" else [])
        assert main(["plan", "--model", str(tmp_path / f"{name}.json"), *words, "--details"]) == 0
        said_of = "1 a step: trained towers add" if name == "model" else "images count by their tokens alone"
        assert said_of in capsys.readouterr().out
    assert seconds[0] > seconds[1]
