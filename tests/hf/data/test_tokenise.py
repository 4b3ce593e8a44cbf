"""Tokenising: labels are on what is to be learnt and nowhere else, compared with counted UTF-8 bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers.models.chats import (
    BARE_TEMPLATE,
    TEMPLATE,
    byte_tokenizer,
    conversation,
    labels_by_bytes,
    rendered_by_hand,
    word_tokenizer,
)
from tokenizers import processors
from transformers import ByT5Tokenizer

from hf_longctx import DataError, tokenise_chat, tokenise_completions, tokenise_text
from hf_longctx.hf.data import tokenise
from hf_longctx.hf.data.tokenise import TokenCounts, count_tokens, uniform

CHATML = Path(__file__).parents[3] / "recipes" / "configs" / "chatml.jinja"
PIECES = ["the cat", " sat", "\n\n", "😀", "é", " ", "hello", "<|end|>", "漢字", "?", "to you 👨‍👩‍👧"]


def chats(*conversations: Any, **columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"messages": list(conversations), **columns})


def random_conversations(seed: int, count: int) -> list[list[dict[str, str]]]:
    generator = random.Random(seed)
    return [
        conversation(*("".join(generator.choices(PIECES, k=generator.randint(0, 5))) for _ in range(generator.randint(2, 7))))
        for _ in range(count)
    ]


@pytest.mark.parametrize("template", [TEMPLATE, BARE_TEMPLATE], ids=["end learnt", "end not learnt"])
def test_chat_labels_are_those_counted_in_bytes(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    conversations = [*random_conversations(1, 40), conversation("hi", "ends in 😀", "so", "a")]
    conversations = [messages for messages in conversations if any(m["content"] for m in messages[1::2])]
    rows = tokenise_chat(chats(*conversations), tokenizer)
    assert len(rows) == len(conversations)
    for messages, row in zip(conversations, rows, strict=True):
        text, spans = rendered_by_hand(messages, end_is_learnt=template == TEMPLATE)
        assert row["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert row["labels"] == labels_by_bytes(tokenizer, row["input_ids"], spans)
        assert any(label != -100 for label in row["labels"])


@pytest.mark.parametrize("make", [byte_tokenizer, word_tokenizer])
@pytest.mark.parametrize("template", [TEMPLATE, CHATML.read_text()], ids=["plain", "shipped"])
def test_transformers_agrees_where_its_mask_is_right(make: Any, template: str) -> None:
    tokenizer = make(template)
    messages = conversation("what is this?", "it is an answer", "to a question", "hello", system="one two")
    (row,) = tokenise_chat(chats(messages), tokenizer)
    expected = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert row["input_ids"] == expected["input_ids"]
    assert row["labels"] == [
        token if learnt else -100 for token, learnt in zip(row["input_ids"], expected["assistant_masks"], strict=True)
    ]


def test_white_space_without_a_token_does_not_lose_the_rest() -> None:
    """transformers' mask stops if a span starts in white space without a token, and runs on if a span ends in it."""
    tokenizer = word_tokenizer(BARE_TEMPLATE)
    messages = conversation("one", " two", "three", "four \n", "hello", "cat")
    (row,) = tokenise_chat(chats(messages), tokenizer)
    learnt = [
        token for token, label in zip(tokenizer.convert_ids_to_tokens(row["input_ids"]), row["labels"], strict=True) if label >= 0
    ]
    assert learnt == ["two", "four", "cat"]


def test_tools_and_tool_calls_of_the_shipped_template() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "what is it?"},
        {"role": "assistant", "content": "hello", "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "it is one"},
    ]
    tokenizer = byte_tokenizer(CHATML.read_text())
    dataset = datasets.Dataset.from_list([{"messages": messages, "tools": '[{"name": "weather"}]'}])
    (row,) = tokenise_chat(dataset, tokenizer)
    text = tokenizer.decode(row["input_ids"])
    assert '<tools>\n{"name": "weather"}\n</tools>' in text
    assert "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n" in text
    learnt = tokenizer.decode([label for label in row["labels"] if label >= 0])
    one_call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert learnt == f"hello\n{one_call}\n{one_call}<|im_end|>it is one<|im_end|>"


def test_share_gpt_gives_the_same_rows() -> None:
    tokenizer = byte_tokenizer()
    share_gpt = [{"from": "human", "value": "what is this?"}, {"from": "gpt", "value": "it is"}]
    rows = tokenise_chat(datasets.Dataset.from_dict({"conversations": [share_gpt]}), tokenizer, "conversations")
    assert rows[0] == tokenise_chat(chats(conversation("what is this?", "it is")), tokenizer)[0]


def test_conversations_without_an_answer_are_counted_and_left_out(caplog) -> None:
    tokenizer = byte_tokenizer()
    rows = tokenise_chat(chats(conversation("a"), conversation("a", "b"), conversation("c")), tokenizer)
    assert len(rows) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 3 rows are left out, because they have no message of the assistant that is learnt"
    ]
    with pytest.raises(DataError, match="none of the 2 rows has any message of the assistant"):
        tokenise_chat(chats(conversation("a"), conversation("b")), tokenizer)


def test_errors_name_the_row_of_the_original() -> None:
    rows = chats(conversation("a", "b"), [{"from": "x", "value": "y"}])
    with pytest.raises(DataError, match="row 1 column 'messages' message 0 is from the unknown speaker 'x'"):
        tokenise_chat(rows, byte_tokenizer())
    with pytest.raises(DataError, match="row 90 column 'messages'"):
        tokenise_chat(rows, byte_tokenizer(), row_numbers=[7, 90])


def test_offsets_that_miss_the_text_are_refused() -> None:
    rendered = tokenise.RenderedText("hello", ((0, 5),))
    with pytest.raises(DataError, match="gives no token for 'hello'"):
        tokenise._span_labels([3, 4], [(0, 0), (5, 5)], rendered)


def test_completions_have_labels_on_the_completion_and_the_end() -> None:
    tokenizer = byte_tokenizer()
    prompts, completions = ["what is this? 😀", "", None, "a"], ["it is 😀", "hello", "one<|end|>", ""]
    dataset = datasets.Dataset.from_dict({"prompt": prompts, "completion": completions})
    rows = list(tokenise_completions(dataset, tokenizer))
    assert len(rows) == 3
    for prompt, completion, row in zip(prompts[:3], completions[:3], rows, strict=True):
        text = (prompt or "") + completion.removesuffix("<|end|>") + "<|end|>"
        assert row["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
        spans = [(len((prompt or "").encode()), len(text.encode()))]
        assert row["labels"] == labels_by_bytes(tokenizer, row["input_ids"], spans)
    # white space may have no token at all, but the end token is still learnt
    blank = datasets.Dataset.from_dict({"prompt": [""], "completion": [" "]})
    assert list(tokenise_completions(blank, word_tokenizer())) == [{"input_ids": [1], "labels": [1]}]
    with pytest.raises(DataError, match="cannot say where the completion begins"):
        tokenise_completions(dataset, ByT5Tokenizer(extra_ids=0))


def test_special_tokens_of_the_tokenizer_are_added_to_completions_and_not_to_chats() -> None:
    """Special tokens around a completion cover no characters, but the end token is learnt; a chat template writes its own."""
    tokenizer = byte_tokenizer()
    start, end = tokenizer.convert_tokens_to_ids(["<|pad|>", "<|end|>"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A <|end|>", special_tokens=[("<|pad|>", start), ("<|end|>", end)]
    )
    (row,) = tokenise_completions(datasets.Dataset.from_dict({"prompt": [""], "completion": ["hello"]}), tokenizer)
    assert row["input_ids"][0] == start and row["labels"][0] == -100
    assert row["input_ids"][1:] == row["labels"][1:] and row["labels"].count(end) == 1 and row["labels"][-1] == end
    messages = conversation("what is this?", "it is")
    (row,) = tokenise_chat(chats(messages), tokenizer)
    assert tokenizer.decode(row["input_ids"]) == rendered_by_hand(messages)[0]


def test_text_columns_are_joined_and_empty_rows_left_out(caplog) -> None:
    tokenizer = byte_tokenizer()
    dataset = datasets.Dataset.from_dict({"title": ["one", None, "", "two"], "body": ["cat", "hello", None, ""]})
    rows = list(tokenise_text(dataset, tokenizer, ("title", "body"), separator=" | "))
    assert [tokenizer.decode(row["input_ids"]) for row in rows] == ["one | cat<|end|>", "hello<|end|>", "two<|end|>"]
    assert all(list(row) == ["input_ids"] for row in rows)
    assert "1 of 4 rows are left out" in caplog.text


def test_counts_leave_out_the_first_label_of_a_row() -> None:
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4], [5, 6]], "labels": [[1, -100, 3], [4], [-100, 6]]})
    assert count_tokens(rows) == TokenCounts(3, 6, 2)
    # a selected dataset has only its own rows
    assert count_tokens(rows.select([2, 0])) == TokenCounts(2, 5, 2)
    plain = rows.remove_columns("labels")
    assert count_tokens(plain) == TokenCounts(3, 6, 3)
    assert uniform(plain, True)["labels"][:] == [[1, 2, 3], [4], [5, 6]]


def test_a_second_process_finds_the_tokens_of_the_first(tmp_path: Path, monkeypatch) -> None:
    """Equal files, settings and tokenizers have the same fingerprint, even after the tokenizer was used."""
    chats(conversation("a", "b"), conversation("c", "hello")).to_json(tmp_path / "chats.jsonl")
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def load() -> tuple[datasets.Dataset, Any]:
        from transformers import AutoTokenizer

        rows = datasets.load_dataset("json", data_files=str(tmp_path / "chats.jsonl"), split="train", cache_dir=str(tmp_path))
        return rows, AutoTokenizer.from_pretrained(tmp_path / "tokenizer")

    rows, tokenizer = load()
    tokenizer(["used before"], add_special_tokens=False)
    first = tokenise_chat(rows, tokenizer)
    monkeypatch.setattr(tokenise, "render_chat", lambda *_: pytest.fail("tokenised again"))
    rows, tokenizer = load()
    assert tokenise_chat(rows, tokenizer)[:] == first[:]
    # another template gives another fingerprint
    tokenizer.chat_template = BARE_TEMPLATE
    with pytest.raises(BaseException, match="tokenised again"):
        tokenise_chat(rows, tokenizer)


KWARGS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if quiet is defined and quiet %}quiet{% endif %}"
    + TEMPLATE.replace(
        "{{ message.content + '<|end|>' }}{% endgen",
        "{{ message.content or '' }}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|end|>{% endgen",
    )
)


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="needs a datasets that reads values of mixed types as JSON")
def test_variables_and_nulls_of_a_file_are_rendered_as_the_template_gets_them_from_transformers(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": {"default": None}}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": value, "n": 1}}]},
            ],
            "tools": [tool],
            "chat_template_kwargs": {"quiet": quiet},
        }
        for value, quiet in ((None, True), ("s", False))
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path))
    tokenizer = byte_tokenizer(KWARGS_TEMPLATE)
    for row, found in zip(rows, tokenise_chat(read, tokenizer), strict=True):
        # the name that TRL gives it
        expected = tokenizer.apply_chat_template(
            row["messages"],
            tools=row["tools"],
            return_assistant_tokens_mask=True,
            return_dict=True,
            **row["chat_template_kwargs"],
        )
        assert found["input_ids"] == expected["input_ids"]
        pairs = zip(expected["input_ids"], expected["assistant_masks"], strict=True)
        assert found["labels"] == [token if is_learnt else -100 for token, is_learnt in pairs]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt_mask": [[0, 1]]}, "a column 'prompt_mask', which is not read"),
        ({"weight": [0.5]}, "a column 'weight', which is not read"),
        ({"loss_mask": ["0 1"]}, "a column 'loss_mask', which is not read"),
        ({"label": [False]}, "a column 'label', which is not read"),
        ({"quiet": [True]}, "a column 'quiet', and the chat template reads a variable of this name"),
        ({"turns": [[0, 1]]}, "a column 'turns' with one number per message"),
        ({"system": ["be kind"]}, "row 0 has 'system': 'be kind', which is not read"),
        ({"images": [["a.png"]]}, r"row 0 has 'images': \['a.png'\], which is not read"),
        ({"chat_template": ["x"]}, "row 0 has 'chat_template': 'x', which is not read"),
    ],
)
def test_columns_that_would_change_the_text_or_the_mask_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        tokenise_chat(chats(conversation("a", "b"), **columns), byte_tokenizer(KWARGS_TEMPLATE))


def test_columns_that_describe_a_row_are_named_once(caplog: Any) -> None:
    harmless = {"id": [3], "source": ["web"], "score": [0.5], "label_text": ["good"], "system": [None], "images": [[]]}
    rows = chats(conversation("a", "b"), **harmless)
    assert tokenise_chat(rows, byte_tokenizer())[:] == tokenise_chat(chats(conversation("a", "b")), byte_tokenizer())[:]
    assert [record.getMessage() for record in caplog.records] == ["columns not read: id, source, score, label_text"]


@pytest.mark.parametrize("make", [tokenise_chat, tokenise_text, tokenise_completions])
def test_a_column_that_is_not_there_is_named(make: Any) -> None:
    with pytest.raises(DataError, match=r"the dataset has no column '\w+' \(it has said\)"):
        make(datasets.Dataset.from_dict({"said": ["a"]}), byte_tokenizer())


@pytest.mark.parametrize("mask", [[1.0, 1.0, 0.0], ["1", "1", "0"], 1, None])
def test_masks_that_are_no_integers_are_refused_before_mixing(mask: Any) -> None:
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2, 3], "attention_mask": mask}])
    with pytest.raises(DataError, match=r"a dataset column 'attention_mask' holds .*, expected a list of integers per row"):
        uniform(rows, False)
