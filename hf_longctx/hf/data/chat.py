"""Turns conversations into text: checks the messages, renders them with the chat template, and finds what the assistant said.

Called by `tokenise_chat`. The assistant's text is whatever the template puts between `{% generation %}` and
`{% endgeneration %}`; it is kept as character spans. A stock template without these markers is replaced by TRL's training
template where TRL is installed and has one; the turns of others are proven by `assistant_turns.py`.

transformers can derive a token mask from the spans of markers (`return_assistant_tokens_mask`), but that mask drops the last
bytes of a character that takes several tokens, and drops everything after a span that starts or ends in white space to which no
token belongs. So only the spans come from transformers' renderer, and `tokenise.py` maps them to tokens with the tokenizer's
offsets.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hf_longctx.hf.data.assistant_turns import UnprovenError, assistant_spans, marked_template
from hf_longctx.hf.ranks.launch import on_first_rank
from hf_longctx.hf.ranks.refusals import RefusedRun

logger = logging.getLogger(__name__)
logger.addFilter(on_first_rank)

Message = dict[str, Any]

# speaker names of the ShareGPT format -> roles of chat templates
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REMEDY = (
    "for a ChatML template (<|im_start|>) set chat_template to recipes/configs/chatml.jinja, which has markers, and for another "
    "install TRL 1.16, which brings training templates for the stock templates of many models, or copy the template to a file, "
    "put {% generation %} before the assistant's text and {% endgeneration %} after it (after the end token, too), and set "
    "chat_template to that file"
)
_QUESTIONS, _ANSWERS = ("Zebra", "Quagga"), ("Marmot", "Lemur")


class DataError(RefusedRun):
    """Raised for data or a tokenizer that cannot be trained on; the message says what was found, what is allowed, what to do."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A document and the half-open character spans in it that training learns from."""

    text: str
    spans: tuple[tuple[int, int], ...]


def read_messages(value: Any, row: str) -> list[Message]:
    """Checks the messages of one row and returns them in the form that chat templates expect.

    `row` names the row in error messages. A message is {role, content, ...} or ShareGPT's {from, value}, whose speaker is
    translated to a role. Content is text, a list of {type: text} parts, or absent (in tool calls). Keys whose value is None
    are dropped at every depth, because Arrow adds to each row the keys that other rows have.

    Raises DataError for anything else.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{row} holds {value!r:.60}, expected a list of messages like [{{role: user, content: ...}}, ...]")
    messages = []
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise DataError(f"{row} message {number} is {item!r:.60}, expected {{role: ..., content: ...}}")
        messages.append(_read_message(_without_gaps(item), f"{row} message {number}"))
    return messages


def read_tools(value: Any, row: str) -> list[dict[str, Any]] | None:
    """Returns the tools of a row (a list of JSON schemas, or such a list as JSON text), or None if it has none."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{row} has tools that are not valid JSON ({error}), expected a list of tool schemas") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{row} has the tools {value!r:.60}, expected a list of tool schemas")
    tools: list[dict[str, Any]] = _without_gaps(value)
    return tools


def chat_tokenizer(tokenizer: PreTrainedTokenizerBase, with_tools: bool = False) -> PreTrainedTokenizerBase:
    """Returns the tokenizer, or a copy with TRL's training template, once its template can say what the assistant says.

    Renders a short conversation to check that it finds the assistant's words and not the user's. Raises DataError for a
    template that cannot be used with any conversation.
    """
    check_offsets(tokenizer, "which tokens are the assistant's")
    name = _name(tokenizer)
    if not tokenizer.chat_template:
        raise DataError(
            f"tokenizer {name} has no chat template, so conversations cannot be turned into text; set chat_template to a Jinja "
            f"file for this model that marks the assistant's text with {{% generation %}} ... {{% endgeneration %}}"
        )
    tokenizer = with_training_template(tokenizer)
    for tools in [None, [{"type": "function", "function": {"name": "probe"}}]][: 1 + with_tools]:
        template = tokenizer.get_chat_template(None, tools)
        if not _MARKER.search(template) and marked_template(template) is None:
            raise DataError(
                f"the chat template of tokenizer {name} has no {{% generation %}} marker, and no loop in it reads the roles of "
                f"messages, so it cannot say which tokens are the assistant's; {_REMEDY}"
            )
        _probe(tokenizer, name)
    return tokenizer


def with_training_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Returns a copy of the tokenizer with TRL's training template if TRL is installed and has one, else the tokenizer.

    These templates have markers, and render some conversations otherwise than the stock template (a line in the log says
    that one is used): thinking, for example, stays in all turns, so that a conversation reads the same when it goes on.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or _MARKER.search(template) or importlib.util.find_spec("trl") is None:
        return tokenizer
    from trl.chat_template_utils import get_training_chat_template

    try:
        training_template = get_training_chat_template(tokenizer)
    # TRL knows no training template for it, or its test conversation is not for this template
    except (ValueError, TypeError, TemplateError):
        return tokenizer
    if training_template is None:
        return tokenizer
    logger.warning("tokenizer %s: the stock chat template is replaced by TRL's training template for it", _name(tokenizer))
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = training_template
    return tokenizer


def check_offsets(tokenizer: PreTrainedTokenizerBase, purpose: str) -> None:
    """Raises DataError unless the tokenizer can say which characters a token covers; `purpose` names what needs this."""
    if not tokenizer.is_fast:
        raise DataError(
            f"tokenizer {_name(tokenizer)} ({type(tokenizer).__name__}) is written in Python and does not know which characters "
            f"a token covers, so it cannot say {purpose}; use a fast tokenizer (one with a tokenizer.json)"
        )


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[dict[str, Any]] | None, row: str
) -> RenderedText:
    """Renders a conversation as `tokenizer.apply_chat_template` does, and finds the assistant's spans in the text.

    Raises DataError for a conversation that the template cannot render, or whose turns are not marked and not proven.
    """
    template = tokenizer.get_chat_template(None, tools)
    if _MARKER.search(template):
        text, spans = _rendered(tokenizer, messages, tools, row, chat_template=template, return_assistant_tokens_mask=True)
        return RenderedText(text, tuple((start, stop) for start, stop in spans if start < stop))

    def render(some: list[Message], is_prompted: bool, other: str) -> str:
        return _rendered(tokenizer, some, tools, row, chat_template=other, add_generation_prompt=is_prompted)[0]

    text = render(messages, False, template)
    added = [each.content for each in tokenizer.added_tokens_decoder.values() if each.special]
    end_tokens = {*tokenizer.all_special_tokens, *added}
    try:
        spans = assistant_spans(text, messages, template, render, end_tokens)
    except UnprovenError as error:
        raise DataError(
            f"{row}: the chat template of tokenizer {_name(tokenizer)} has no {{% generation %}} marker, and what the assistant "
            f"says cannot be proven without one: {error}; {_REMEDY}"
        ) from None
    return RenderedText(text, tuple(spans))


def render_text(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[dict[str, Any]] | None, row: str) -> str:
    """Renders a conversation as `tokenizer.apply_chat_template` does."""
    return _rendered(tokenizer, messages, tools, row, chat_template=tokenizer.get_chat_template(None, tools))[0]


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[dict[str, Any]] | None, row: str, **settings: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Renders messages with these settings: the text, and the assistant's spans if a mask was asked for."""
    arguments: dict[str, Any] = {**tokenizer.special_tokens_map, "conversations": [messages], "tools": tools, **settings}
    try:
        # annotated as returning text only, but with a mask it returns spans too
        rendered: Any = render_jinja_template(**arguments)
    # TypeError: the template concatenates text with a list of content parts
    except (TemplateError, TypeError) as error:
        raise DataError(
            f"{row}: the chat template cannot render it: {error}; correct the conversation or chat_template"
        ) from error
    (text,), spans = rendered
    return text, spans[0] if spans else []


def _read_message(message: Message, where: str) -> Message:
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        if speaker not in _ROLES:
            raise DataError(
                f"{where} is from the unknown speaker {speaker!r}; use one of {', '.join(_ROLES)}, or give role and content"
            )
        message = {"role": _ROLES[speaker], "content": message.pop("value", None), **message}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{where} is {message!r:.60}, expected {{role: ..., content: ...}} or {{from: ..., value: ...}}")
    if off := [key for key in ("weight", "train", "training") if message.get(key, 1) != 1]:
        raise DataError(
            f"{where} has {off[0]!r}: {message[off[0]]!r}, which is not supported, and to ignore it would change what is "
            f"trained; remove the key, or give labels of your own"
        )
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" and "text" in part for part in content):
            raise DataError(f"{where} has the content {content!r:.60}, expected text or parts of {{type: text, text: ...}}")
    elif not isinstance(content, str) and not (content is None and len(message) > 1 and message.get("tool_calls")):
        raise DataError(f"{where} has the content {content!r:.60}, expected text (only tool calls may have none)")
    return message


def _without_gaps(value: Any) -> Any:
    """Drops keys whose value is None, at every depth."""
    if isinstance(value, dict):
        return {key: _without_gaps(item) for key, item in value.items() if item is not None}
    return [_without_gaps(item) for item in value] if isinstance(value, list) else value


def _probe(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Renders two turns of known words and raises DataError if the markers enclose the wrong ones.

    A template may refuse this test conversation for reasons of its own; then the real conversations have to show it.
    """
    messages = [
        {"role": role, "content": word}
        for question, answer in zip(_QUESTIONS, _ANSWERS, strict=True)
        for role, word in (("user", question), ("assistant", answer))
    ]
    try:
        rendered = render_chat(tokenizer, messages, None, "a test conversation")
    except DataError as error:
        if "syntax" in type(error.__cause__).__name__.lower():
            raise DataError(
                f"the chat template of tokenizer {name} is not valid Jinja ({error.__cause__}); correct it, or set chat_template "
                f"to another file"
            ) from None
        return
    marked = " ".join(rendered.text[start:stop] for start, stop in rendered.spans)
    if any(word in marked for word in _QUESTIONS) or not any(word in marked for word in _ANSWERS):
        raise DataError(
            f"the {{% generation %}} markers in the chat template of tokenizer {name} enclose {marked!r:.60} in a conversation "
            f"whose assistant says {' and '.join(_ANSWERS)}; put them directly around the assistant's text, outside macros and "
            f"set blocks"
        )


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return repr(tokenizer.name_or_path or type(tokenizer).__name__)
