"""Conversations: which ones can be rendered and learnt from, and errors for the others that name the row and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.models.chats import BARE_TEMPLATE, TEMPLATE, byte_tokenizer, conversation, rendered_by_hand
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from hf_longctx.hf.data.chat import DataError, chat_tokenizer, read_messages, read_tools, render_chat

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
    with pytest.raises(DataError, match="row 7: the chat template cannot render it: system first"):
        render_chat(tokenizer, conversation("a", "b"), None, "row 7")


def test_share_gpt_becomes_roles_and_content() -> None:
    names = ["system", "human", "gpt", "user", "assistant", "tool"]
    found = read_messages([{"from": name, "value": name} for name in names], "row 0")
    roles = ["system", "user", "assistant", "user", "assistant", "tool"]
    assert found == [{"role": role, "content": name} for role, name in zip(roles, names, strict=True)]


def test_keys_that_arrow_added_are_dropped_at_every_depth() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}, "id": None}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    expected = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    assert read_messages([message], "row 0") == [expected]


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
        ([{"role": "assistant", "content": "a", "weight": 0}], "message 0 has 'weight': 0, which is not supported"),
        ([{"role": "assistant", "content": "a", "train": False}], "message 0 has 'train': False, which is not supported"),
    ],
)
def test_malformed_messages_are_refused_with_their_row(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_messages(value, "row 3")


def test_tools_are_a_list_or_its_json() -> None:
    schema = {"type": "function", "function": {"name": "f"}}
    assert read_tools([{**schema, "extra": None}], "row 0") == [schema]
    assert read_tools('[{"type": "function", "function": {"name": "f"}}]', "row 0") == [schema]
    assert read_tools(None, "row 0") is read_tools([], "row 0") is read_tools("", "row 0") is None
    with pytest.raises(DataError, match="row 2 has tools that are not valid JSON"):
        read_tools("{", "row 2")
    with pytest.raises(DataError, match="row 2 has the tools 'f', expected a list"):
        read_tools('"f"', "row 2")
