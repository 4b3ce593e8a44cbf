"""From dataset settings to tokens: several formats in one mix, no training on held-out rows, bad input refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers.models.chats import byte_tokenizer, conversation
from transformers import ByT5Tokenizer, TrainingArguments

from hf_longctx import DataError, LongContextConfig
from hf_longctx.recipes import sources
from hf_longctx.recipes.settings import read_settings
from hf_longctx.recipes.sft import RecipeArguments
from hf_longctx.recipes.sources import Documents, Source, load_tokens

MODEL = ["--model_name_or_path", "m"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Files of every kind, with a separate datasets cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    chats = [{"messages": conversation(f"what is {i}?", f"it is {i}")} for i in range(30)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    pairs = {"prompt": [f"one {i}" for i in range(12)], "completion": [f"two {i}" for i in range(12)]}
    datasets.Dataset.from_dict(pairs).to_parquet(tmp_path / "pairs.parquet")
    (tmp_path / "pages.csv").write_text("title,body\n" + "".join(f"the cat {i},sat {i}\n" for i in range(20)))
    (tmp_path / "lines.txt").write_text("".join(f"three four {i}\n" for i in range(10)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(*sources: Source, **settings: Any) -> Documents:
    return load_tokens(sources, byte_tokenizer(), 0, **settings)


def texts(tokens: datasets.Dataset | None) -> list[str]:
    assert tokens is not None
    return [byte_tokenizer().decode(row) for row in tokens["input_ids"]]


CHATS = Source("chats.jsonl", messages_column="messages", weight=2)
PAIRS = Source("pairs.parquet", prompt_column="prompt", completion_column="completion", weight=1)
PAGES = Source("pages.csv", text_column=("title", "body"), column_separator=" - ", weight=1)


@pytest.mark.wide
def test_formats_are_mixed_by_weight_and_described(folder: Path) -> None:
    documents = load(CHATS, PAIRS, PAGES, held_out=4)
    train, held_out = texts(documents.train), texts(documents.held_out)
    # 28, 11 and 19 documents are left; 11 documents per unit of weight
    assert [sum(word in text for text in train) for word in ("what is", "one", " - sat")] == [22, 11, 11]
    assert [sum(word in text for text in held_out) for word in ("what is", "one", " - sat")] == [2, 1, 1]
    assert not set(train) & set(held_out) and len(set(train)) == 44
    by_text = dict(zip(train, documents.train["labels"], strict=True))
    text = next(text for text in train if " - sat" in text)
    assert -100 not in by_text[text]
    assert [line.split(",")[0] for line in documents.lines] == [
        *("chats.jsonl: 28 documents", "pairs.parquet: 11 documents", "pages.csv: 19 documents"),
        *("held out: 4 documents", "mix (weights 2"),
    ]
    assert "% with loss" in documents.lines[0]
    assert texts(load(CHATS, PAIRS, PAGES, held_out=4).train) == train


def test_one_text_dataset_has_no_labels_and_keeps_its_limits(folder: Path) -> None:
    documents = load(Source("lines.txt", max_documents=6), held_out=2, max_document_chars=13)
    assert documents.train.column_names == ["input_ids"]
    assert len(documents.train) == 4 and documents.held_out is not None and len(documents.held_out) == 2
    assert len(documents.lines) == 2


def test_a_held_out_dataset_of_its_own_takes_its_copies_out_of_training(folder: Path) -> None:
    lines = (folder / "chats.jsonl").read_text().splitlines(keepends=True)
    (folder / "other.jsonl").write_text("".join(lines[3:8]) + json.dumps({"messages": conversation("new", "cat")}) + "\n")
    other = Source("other.jsonl", messages_column="messages")
    documents = load(Source("chats.jsonl", messages_column="messages"), held_out=other)
    assert len(documents.train) == 25 and len(texts(documents.held_out)) == 6
    assert not set(texts(documents.train)) & set(texts(documents.held_out))
    assert "5 training documents are left out, because they are copies of held-out ones" in documents.lines


def test_folders_written_by_datasets_are_read(folder: Path) -> None:
    rows = datasets.load_dataset("csv", data_files="pages.csv", split="train")
    rows.save_to_disk("one")
    datasets.DatasetDict({"train": rows, "test": rows.select(range(3))}).save_to_disk("both")
    assert len(load(Source("one", text_column=("body",))).train) == 20
    assert len(load(Source("both", text_column=("body",), split="test")).train) == 3
    with pytest.raises(DataError, match="has no split 'dev'; it has train, test"):
        load(Source("both", text_column=("body",), split="dev"))
    with pytest.raises(DataError, match="has no splits, but split is 'test'"):
        load(Source("one", text_column=("body",), split="test"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source("none.jsonl"), "none.jsonl does not exist; check the path"),
        (Source("empty.jsonl"), "empty.jsonl is empty"),
        (Source("broken.jsonl"), "broken.jsonl cannot be read as json"),
        (Source("missing/folder"), "missing/folder cannot be loaded"),
        (Source("lines.txt", split="test"), "has no splits, but split is 'test'; leave the split out"),
        (Source("chats.jsonl"), r"has no column 'text'; it has messages \(set messages_column\)"),
        (Source("pairs.parquet"), r"it has prompt, completion \(set prompt_column and completion_column\)"),
        (Source("lines.txt", messages_column="chat"), r"has no column 'chat'; it has text \(set messages_column\)"),
        (Source("pages.csv", text_column=("title", "x")), r"has no column 'x'; it has title, body \(set text_column\)"),
        (Source("chats.jsonl", text_column=("messages",)), "column 'messages' of chats.jsonl holds .* expected text"),
        (
            Source("lines.txt", messages_column="text"),
            r"lines.txt: row (\d) column 'text' holds 'three four \1', expected a list",
        ),
    ],
)
def test_bad_data_is_refused_in_one_line(folder: Path, source: Source, message: str) -> None:
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=message) as error:
        load(source)
    assert "\n" not in str(error.value)


def test_what_does_not_fit_together_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"max_document_chars is for text, but dataset chats\.jsonl has other columns"):
        load(CHATS, max_document_chars=5)
    with pytest.raises(DataError, match=r"lines\.txt has no documents left; check its columns and max_document_chars"):
        load(Source("lines.txt"), max_document_chars=1)
    with pytest.raises(DataError, match=r"a dataset has 10 documents and 10 of them would be held out, .* lower eval_documents"):
        load(Source("lines.txt"), held_out=10)
    with pytest.raises(DataError, match=r"dataset chats\.jsonl: tokenizer 'ByT5Tokenizer' .* use a fast tokenizer"):
        load_tokens([CHATS], ByT5Tokenizer(extra_ids=0), 0)


def settings(*words: str) -> RecipeArguments:
    return read_settings((RecipeArguments, LongContextConfig, TrainingArguments), [*MODEL, "--use_cpu", "true", *words])[0]


def test_entries_of_a_file_and_short_forms_make_sources(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "model_name_or_path: m\nuse_cpu: true\ndatasets:\n- path: a.jsonl\n  messages_column: chat\n  weight: 3\n"
        "- {path: b, config: en, split: test, text_column: [title, body], column_separator: '---', weight: 0.5, "
        "max_documents: 4}\n"
        "eval_dataset: {path: c.jsonl, messages_column: chat}\n"
    )
    recipe = read_settings((RecipeArguments, LongContextConfig, TrainingArguments), [str(tmp_path / "c.yaml")])[0]
    assert recipe.sources == [
        Source("a.jsonl", messages_column="chat", weight=3),
        Source("b", "en", "test", ("title", "body"), "---", weight=0.5, max_documents=4),
    ]
    assert recipe.eval_source == Source("c.jsonl", messages_column="chat")
    (tmp_path / "d.yaml").write_text(
        "model_name_or_path: m\nuse_cpu: true\ndataset: x\ntext_column: [a, b]\ncolumn_separator: '---'\n"
    )
    recipe = read_settings((RecipeArguments, LongContextConfig, TrainingArguments), [str(tmp_path / "d.yaml")])[0]
    assert recipe.sources == [Source("x", text_column=("a", "b"), column_separator="---")]
    short = settings("--dataset", "x.csv", "--dataset_split", "train", "--prompt_column", "p", "--completion_column", "c")
    assert short.sources == [Source("x.csv", prompt_column="p", completion_column="c")]
    held_out = settings("--dataset", "x.csv", "--eval_dataset", "y.csv", "--text_column", "body", "--max_documents", "3")
    assert held_out.eval_source == Source("y.csv", text_column=("body",))


def entry(**keys: Any) -> str:
    return json.dumps({"path": "a", **keys})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give exactly one of dataset .* and datasets"),
        (["--dataset", "x", "--datasets", entry()], "give exactly one of dataset"),
        (["--datasets", entry(), "--text_column", "t"], "text_column belongs to dataset; with datasets, give text_column in its"),
        (["--datasets", "a.jsonl"], "datasets is not valid JSON"),
        (["--datasets", "[1]"], r"an entry is \[1\], expected a mapping with a path"),
        (["--datasets", entry(wieght=1)], "unknown key 'wieght' of dataset a; did you mean weight"),
        (["--datasets", entry(weight="2")], "weight of dataset a is '2', expected a number"),
        (["--datasets", entry(weight=0)], "has weight 0; give a positive number, or leave the dataset out"),
        (["--datasets", entry(weight=1), '{"path": "b"}'], "dataset b has no weight, but others have one"),
        (["--datasets", entry(max_documents=1.5)], "max_documents of dataset a is 1.5, expected a whole number"),
        (["--datasets", entry(max_documents=0)], "max_documents 0; give a positive number"),
        (["--datasets", entry(text_column=[])], r"text_column of dataset a is \[\], expected one or more names"),
        (["--datasets", entry(messages_column=3)], "messages_column of dataset a is 3, expected text"),
        (["--datasets", entry(text_column="t", messages_column="m")], "has text_column and messages_column; give only one"),
        (["--dataset", "a", "--text_column", "t", "--messages_column", "m"], "has text_column and messages_column"),
        (["--dataset", "a", "--prompt_column", "p"], "needs both prompt_column and completion_column"),
        (["--dataset", "a", "--column_separator", "x"], "has a column_separator but only one text_column"),
        (["--dataset", "python-stdlib", "--messages_column", "m"], "python-stdlib has one column of text"),
        (["--dataset", "a", "--mix_until", "all_exhausted"], "mix_until all_exhausted has no effect without weights"),
        (["--dataset", "a", "--eval_dataset", "b", "--eval_documents", "3"], "give either eval_documents .* or eval_dataset"),
        (["--dataset", "a", "--eval_documents", "-1"], "eval_documents is -1; give 0 or more"),
        (["--dataset", "a", "--eval_dataset", "a"], "eval_dataset a is also trained on"),
        (["--dataset", "a", "--eval_dataset", entry(path="b", weight=1)], "eval_dataset b has a weight, which has no effect"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=f"settings: .*{message}") as error:
        settings(*words)
    assert "\n" not in str(error.value)


def test_a_document_that_is_too_long_or_a_template_is_refused_before_anything_is_tokenised(folder: Path, monkeypatch) -> None:
    whole = []
    monkeypatch.setattr(
        sources._Opened,
        "tokenised",
        lambda self, tokenizer: whole.append(self) or self._encoded(self.documents, tokenizer, self.order),
    )
    longest = max(map(len, load(Source("lines.txt")).train["input_ids"]))
    whole.clear()
    assert load_tokens([Source("lines.txt")], byte_tokenizer(), 0, most_tokens=longest).train
    assert len(whole) == 1
    with pytest.raises(
        DataError, match=rf"lines.txt: row \d+ has {longest} tokens, above max_length {longest - 1}; set long_seq"
    ):
        load_tokens([Source("lines.txt")], byte_tokenizer(), 0, most_tokens=longest - 1)
    # the first set would take its time, and the second cannot be read
    with pytest.raises(DataError, match=r"chatml\.jinja"):
        load_tokens([Source("lines.txt"), Source("chats.jsonl", messages_column="messages")], byte_tokenizer("{{ 1 }}"), 0)
    assert len(whole) == 1


def test_a_longest_row_without_an_answer_says_nothing_about_others(folder: Path) -> None:
    rows = [{"messages": conversation("long " * 50)}, {"messages": conversation("a", "b")}]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(load(Source("asked.jsonl", messages_column="messages")).train) == 1
