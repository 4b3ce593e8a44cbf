"""Conversations: which ones can be rendered and learnt from, and errors for the others that name the row and the remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers.measures.calls import counted_calls
from helpers.models.chats import BARE_TEMPLATE, TEMPLATE, byte_tokenizer, conversation, rendered_by_hand
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from hf_longctx.hf.data import chat
from hf_longctx.hf.data.chat import (
    DataError,
    as_written,
    chat_tokenizer,
    keeps_nulls,
    read_messages,
    read_template_kwargs,
    read_tools,
    render_chat,
)

UNMARKED = "{% for number in range(messages | length) %}{{ messages[number].content }}{% endfor %}"
BARE = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def slow_tokenizer(template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [TEMPLATE, BARE_TEMPLATE, TEMPLATE.replace("{% generation %}", "{%- generation -%}")])
def test_rendered_text_and_spans_are_those_found_by_hand(template: str) -> None:
    messages = conversation(" hi ", "hello", "ok?", "", "and 😀", "é\n", system="be kind")
    rendered = render_chat(byte_tokenizer(template), messages, None, "row 0")
    text, byte_spans = rendered_by_hand(messages, end_is_learnt=template != BARE_TEMPLATE)
    assert rendered.text == text
    found = [rendered.text[start:stop].encode() for start, stop in rendered.spans]
    # an empty span has nothing to learn
    assert found == [text.encode()[start:stop] for start, stop in byte_spans if start < stop]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (slow_tokenizer(TEMPLATE), "ByT5Tokenizer.* is written in Python .* use a fast tokenizer"),
        (byte_tokenizer(None), "has no chat template, .* set chat_template to a Jinja file"),
        (byte_tokenizer(UNMARKED), "has no {% generation %} marker, and no loop .* set chat_template to that file"),
        (byte_tokenizer("{# {%" + " generation %} #}" + BARE), "markers .* enclose ''"),
        (byte_tokenizer(TEMPLATE.replace("== 'assistant'", "== 'user'")), "markers .* enclose 'Zebra.*Marmot and Lemur"),
        (
            byte_tokenizer(
                "{% for m in messages %}{% set t %}{{ m.role + ' ' }}{% if m.role == 'assistant' %}{% generation %}"
                "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endset %}{{ t }}{% endfor %}"
            ),
            "outside macros and set blocks",
        ),
        (byte_tokenizer(TEMPLATE + "{% for %}"), "is not valid Jinja"),
    ],
    ids=["slow", "no template", "no marker", "marker in a comment", "wrong role", "in a set block", "broken"],
)
def test_a_tokenizer_that_cannot_say_who_speaks_is_refused_by_name(tokenizer: PreTrainedTokenizerBase, message: str) -> None:
    tokenizer.name_or_path = "org/model"
    with pytest.raises(DataError, match=message) as error:
        chat_tokenizer(tokenizer)
    assert "'org/model'" in str(error.value) and "\n" not in str(error.value)


def test_a_template_of_its_own_for_tools_needs_markers_too() -> None:
    tokenizer = byte_tokenizer({"default": TEMPLATE, "tool_use": UNMARKED})
    chat_tokenizer(tokenizer)
    with pytest.raises(DataError, match="marker"):
        chat_tokenizer(tokenizer, with_tools=True)


def test_a_template_that_refuses_the_test_conversation_is_judged_by_the_real_ones() -> None:
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + TEMPLATE
    tokenizer = byte_tokenizer(strict)
    chat_tokenizer(tokenizer)
    with pytest.raises(DataError, match=r"row 7: the chat template of tokenizer .* cannot render it: system first"):
        render_chat(tokenizer, conversation("a", "b"), None, "row 7")


def test_share_gpt_becomes_roles_and_content() -> None:
    names = ["system", "human", "gpt", "user", "assistant", "tool"]
    found = read_messages([{"from": name, "value": name} for name in names], "row 0")
    roles = ["system", "user", "assistant", "user", "assistant", "tool"]
    assert found == [{"role": role, "content": name} for role, name in zip(roles, names, strict=True)]


def test_keys_that_arrow_added_are_dropped_at_every_depth() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None, "never": None}}, "id": None}
    rows = datasets.Dataset.from_list(
        [
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [call], "name": None}]},
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "x",
                        "tool_calls": [{"id": "1", "function": {"name": "g", "arguments": {"b": 2}}}],
                    }
                ]
            },
        ]
    )
    (message,) = read_messages(as_written(rows[0]["messages"], rows.features["messages"]), "row 0")
    # a key that is null in every row was written as null
    assert message == {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "never": None}}}]}


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="needs a datasets that reads values of mixed types as JSON")
def test_nulls_that_the_file_holds_stay(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"x": None, "n": 1, "deep": [{"y": None}]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "string", "default": None}}}}
    for others in ({"x": "text", "n": 2, "deep": [{"y": 3}]}, {"z": 1}):
        rows = [
            {"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": [tool]},
            {
                "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": others}}]}],
                "tools": [tool],
            },
        ]
        file = tmp_path / f"{len(others)}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        read = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
        assert keeps_nulls(read)
        assert read_messages(read[0]["messages"], "row 0")[0]["tool_calls"] == [call]
        assert read_tools(read[0]["tools"], "row 0") == [tool] == read_tools(json.dumps([tool]), "row 0")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "row 3 holds None, expected a list of messages"),
        ([], r"row 3 holds \[\], expected a list of messages"),
        ("user: hi", "row 3 holds 'user: hi', expected a list of messages"),
        (["hi"], "row 3 message 0 is 'hi', expected"),
        ([{"role": "user"}], "message 0 has the content None, expected text"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 1 is {'content': 'b'}, expected"),
        ([{"role": 1, "content": "a"}], "message 0 is .* expected"),
        ([{"role": "user", "content": 5}], "has the content 5, expected text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "has the content .*image.* expected text or parts"),
        ([{"from": "alice", "value": "a"}], "message 0 is from the unknown speaker 'alice'; use one of human, user, gpt"),
        ([{"from": "human", "text": "a"}], "has the content None, expected text"),
        ([{"from": ["gpt"], "value": "a"}], r"message 0 is from the unknown speaker \['gpt'\]"),
        (
            [{"from": "gpt", "value": "a", "role": "user"}],
            "0 has the role 'user', but by from and value it is 'assistant'",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "has the content .* expected text or parts"),
    ],
)
def test_malformed_messages_are_refused_with_their_row(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_messages(value, "row 3")


def test_tools_are_a_list_or_its_json() -> None:
    schema = {"type": "function", "function": {"name": "f"}}
    assert read_tools([{**schema, "extra": None}], "row 0") == [{**schema, "extra": None}]
    assert read_tools('[{"type": "function", "function": {"name": "f"}}]', "row 0") == [schema]
    assert read_tools(None, "row 0") is read_tools([], "row 0") is read_tools("", "row 0") is None
    with pytest.raises(DataError, match="row 2 has tools that are not valid JSON"):
        read_tools("{", "row 2")
    with pytest.raises(DataError, match="row 2 has the tools 'f', expected a list"):
        read_tools('"f"', "row 2")


FLAGS = ["weight", "loss_weight", "loss_scale", "loss", "loss_mask", "train", "training", "trainable"]
NO_MARKERS = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "") + (
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize("template", [TEMPLATE, NO_MARKERS], ids=["markers", "proven"])
@pytest.mark.parametrize("flag", FLAGS)
def test_turns_whose_flags_say_so_are_not_learnt(template: str, flag: str) -> None:
    def learnt(**flags: Any) -> list[str]:
        messages = conversation("what", "one", "and", "two")
        messages[1].update(flags)
        messages[0]["weight"] = 0
        rendered = render_chat(byte_tokenizer(template), messages, None, "row 7")
        return [rendered.text[start:stop] for start, stop in rendered.spans]

    for value in (0, False, 0.0):
        assert learnt(**{flag: value}) == ["two<|end|>"]
    for value in (None, 1, True, 1.0):
        assert learnt(**{flag: value}) == ["one<|end|>", "two<|end|>"]
    for value in (0.5, 2, -1, "false", [0], float("nan")):
        with pytest.raises(DataError, match=rf"row 7 message 1 has '{flag}': {re.escape(repr(value))}, expected true or 1"):
            learnt(**{flag: value})
    other = "weight" if flag != "weight" else "train"
    assert learnt(**{flag: False, other: 0}) == ["two<|end|>"]
    with pytest.raises(DataError, match="row 7 message 1 has flags that disagree"):
        learnt(**{flag: 0, other: 1})


def test_flags_that_would_teach_another_speaker_are_refused() -> None:
    for flag in FLAGS:
        messages: list[dict[str, Any]] = conversation("what", "one")
        messages[0][flag] = 1
        if flag in ("weight", "loss_scale"):
            assert len(render_chat(byte_tokenizer(), messages, None, "row 7").spans) == 1
            continue
        with pytest.raises(DataError, match=f"row 7 message 0 has '{flag}': 1, but its role is 'user'"):
            render_chat(byte_tokenizer(), messages, None, "row 7")


def test_fields_that_nothing_reads_are_refused_unless_they_are_notes() -> None:
    messages: list[dict[str, Any]] = conversation("what", "one")
    messages[1].update({"id": 3, "timestamp": "now", "name": "Ann", "reasoning_content": "hm", "mine": None})
    assert render_chat(byte_tokenizer(), messages, None, "row 7").text == "<|user|>what<|end|><|assistant|>one<|end|>"
    reads = TEMPLATE.replace("{{ message.content", "{{ (message.mine or '') + message.content")
    messages[1]["mine"] = "hm, "
    assert "hm, one" in render_chat(byte_tokenizer(reads), messages, None, "row 7").text
    with pytest.raises(DataError, match="row 7 message 1 has 'mine': 'hm, ', which the chat template does not read"):
        render_chat(byte_tokenizer(), messages, None, "row 7")
    messages[1] = {**conversation("a", "b")[1], "train_detail": [{"begin_offset": 0}]}
    with pytest.raises(DataError, match=r"row 7 message 1 has 'train_detail': \[\{.*which is not supported"):
        render_chat(byte_tokenizer(), messages, None, "row 7")
    messages[1] = {"role": "assistant", "content": [{"type": "text", "text": "b", "weight": 0}]}
    with pytest.raises(DataError, match="row 7 message 1 has a part of its content with 'weight': 0"):
        render_chat(byte_tokenizer(), messages, None, "row 7")


def test_a_template_that_prints_one_turn_for_two_messages_cannot_say_what_a_flag_means() -> None:
    joined = (
        "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"
        "{% generation %}{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}{% endif %}"
        "{% endfor %}{% endgeneration %}"
    )
    messages: list[dict[str, Any]] = conversation("a", "b", "c", "d")
    assert len(render_chat(byte_tokenizer(joined), messages, None, "row 7").spans) == 1
    messages[1]["loss"] = False
    with pytest.raises(DataError, match=r"row 7: the chat template .* cannot say to which turn a flag belongs"):
        render_chat(byte_tokenizer(joined), messages, None, "row 7")


def test_variables_of_a_row_reach_the_template() -> None:
    template = "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}" + TEMPLATE
    for given, start in (({}, "<|user|>"), ({"enable_thinking": False}, "no<|user|>")):
        text = render_chat(byte_tokenizer(template), conversation("a", "b"), None, "row 7", given).text
        assert text.startswith(start)
        expected = byte_tokenizer(template).apply_chat_template(conversation("a", "b"), tokenize=False, **given)
        assert text == expected
    assert read_template_kwargs(None, "row 7") == read_template_kwargs("", "row 7") == {}
    assert read_template_kwargs('{"a": null}', "row 7") == {"a": None}
    for value, message in (
        (5, "has the chat_template_kwargs 5, expected a mapping"),
        ("[", "has chat_template_kwargs that are not valid JSON"),
        ({"tools": [1]}, "chat_template_kwargs with 'tools': .*give tools in a column 'tools'"),
        ({"continue_final_message": True}, "chat_template_kwargs with 'continue_final_message': True"),
    ):
        with pytest.raises(DataError, match=f"row 7 .*{message}"):
            read_template_kwargs(value, "row 7")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("{{ 1 / 0 }}", "row 7: the chat template of tokenizer 'org/model' cannot render it: ZeroDivisionError"),
        ("{% for i in range(10**9) %}{% endfor %}", "row 7: .* 'org/model' cannot render it: OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "row 7: .* 'org/model' cannot render it: RecursionError"),
        ("{{ messages | sum }}", "row 7: .* 'org/model' cannot render it: TypeError"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "row 7: .* 'org/model' cannot render it: it takes longer than 0.5 s",
        ),
    ],
)
def test_a_template_that_fails_is_named_with_the_row(program: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_MOST_SECONDS", 0.5)
    tokenizer = byte_tokenizer(TEMPLATE + program)
    tokenizer.name_or_path = "org/model"
    with pytest.raises(DataError, match=message):
        render_chat(tokenizer, conversation("a", "b"), None, "row 7")
    # nothing is raised later
    assert render_chat(byte_tokenizer(), conversation("a", "b"), None, "row 8").spans
    # nor does a thread that is profiled stand still
    assert counted_calls(lambda: len(message))[1] > 1


@pytest.mark.parametrize("program", ["{{ 'a' * 10**10 }}", "{{ 10**10**10 }}", "{{ 'a' * (99999 * 99999) }}"])
def test_a_template_that_would_fill_the_memory_is_not_rendered(program: str) -> None:
    with pytest.raises(DataError, match="is not rendered: it multiplies by more than 1,048,576"):
        chat_tokenizer(byte_tokenizer(TEMPLATE + program))
