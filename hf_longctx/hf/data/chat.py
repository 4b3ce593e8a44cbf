"""Conversations to text: messages are checked, rendered by the tokenizer's chat template, and the assistant's part is found.

What the assistant said is what the template puts between `{% generation %}` and `{% endgeneration %}`, as character spans.
transformers' own token mask (`return_assistant_tokens_mask`) is made from these spans too, but it loses the last bytes of
a character that is several tokens long, and all that follows a span that starts or ends in white space without a token.
So spans are taken from its renderer, and `hf/tokenise.py` finds their tokens from the offsets.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, Any]

# ShareGPT's names of the speakers, and what chat templates call them
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_QUESTIONS, _ANSWERS = ("Zebra", "Quagga"), ("Marmot", "Lemur")


class DataError(ValueError):
    """Data or a tokenizer that cannot be trained on; the message has the value, what is allowed, and the remedy."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A document and the half-open character spans in it that are learnt."""

    text: str
    spans: tuple[tuple[int, int], ...]


def read_messages(value: Any, row: str) -> list[Message]:
    """The messages of a row as chat templates take them; `row` is how errors call it.

    A message is {role, content, ...}, or ShareGPT's {from, value}, which becomes role and content: human and user are the
    user, gpt and assistant the assistant, system and tool themselves. Content is text, a list of {type: text} parts, or
    absent (tool calls). Keys without a value are dropped at every depth, since Arrow adds those that other rows have.

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
    """The tools of a row, a list of JSON schemas or that list as JSON text; None where there are none."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{row} has tools that are not JSON ({error}), expected a list of tool schemas") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{row} has the tools {value!r:.60}, expected a list of tool schemas")
    tools: list[dict[str, Any]] = _without_gaps(value)
    return tools


def check_chat_tokenizer(tokenizer: PreTrainedTokenizerBase, with_tools: bool = False) -> None:
    """Raises DataError unless the tokenizer has a chat template that says which tokens are the assistant's.

    A short conversation is rendered to see that the markers lie around the assistant's words and not around the user's.
    """
    check_offsets(tokenizer, "which tokens are the assistant's")
    name = _name(tokenizer)
    if not tokenizer.chat_template:
        raise DataError(
            f"tokenizer {name} has no chat template, so conversations cannot become text; set chat_template to a Jinja file "
            f"of the model's format that marks the assistant's text with {{% generation %}} ... {{% endgeneration %}}"
        )
    for tools in [None, [{"type": "function", "function": {"name": "probe"}}]][: 1 + with_tools]:
        template = tokenizer.get_chat_template(None, tools)
        if not _MARKER.search(template):
            raise DataError(
                f"the chat template of tokenizer {name} has no {{% generation %}} marker, so it cannot say which tokens are "
                f"the assistant's; copy it to a file, put {{% generation %}} before and {{% endgeneration %}} behind the "
                f"assistant's text, end token included, and set chat_template to that file"
            )
        _probe(tokenizer, name)


def check_offsets(tokenizer: PreTrainedTokenizerBase, purpose: str) -> None:
    """Raises DataError unless the tokenizer knows which characters a token stands for; `purpose` says who needs that."""
    if not tokenizer.is_fast:
        raise DataError(
            f"tokenizer {_name(tokenizer)} ({type(tokenizer).__name__}) is written in Python and does not know which characters "
            f"a token stands for, so it cannot say {purpose}; use a fast tokenizer (one with a tokenizer.json)"
        )


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[dict[str, Any]] | None, row: str
) -> RenderedText:
    """The text that `tokenizer.apply_chat_template` makes of a conversation, and the spans of the assistant in it."""
    template = tokenizer.get_chat_template(None, tools)
    arguments: dict[str, Any] = {**tokenizer.special_tokens_map, "conversations": [messages], "tools": tools}
    try:
        # its annotation is that of the text alone
        rendered: Any = render_jinja_template(**arguments, chat_template=template, return_assistant_tokens_mask=True)
    # a template that joins text with a list of parts raises TypeError
    except (TemplateError, TypeError) as error:
        raise DataError(f"{row}: the chat template refuses it: {error}; correct the conversation or chat_template") from error
    (text,), (spans,) = rendered
    return RenderedText(text, tuple((start, stop) for start, stop in spans if start < stop))


def _read_message(message: Message, where: str) -> Message:
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        if speaker not in _ROLES:
            raise DataError(f"{where} is from {speaker!r}, known are {', '.join(_ROLES)}; rename it, or use role and content")
        message = {"role": _ROLES[speaker], "content": message.pop("value", None), **message}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{where} is {message!r:.60}, expected {{role: ..., content: ...}} or {{from: ..., value: ...}}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" and "text" in part for part in content):
            raise DataError(f"{where} has the content {content!r:.60}, expected text or parts of {{type: text, text: ...}}")
    elif not isinstance(content, str) and not (content is None and len(message) > 1 and message.get("tool_calls")):
        raise DataError(f"{where} has the content {content!r:.60}, expected text (only tool calls go without)")
    return message


def _without_gaps(value: Any) -> Any:
    """Drops keys without a value at every depth."""
    if isinstance(value, dict):
        return {key: _without_gaps(item) for key, item in value.items() if item is not None}
    return [_without_gaps(item) for item in value] if isinstance(value, list) else value


def _probe(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Renders two turns of known words. A template that refuses them is judged by the real conversations instead."""
    messages = [
        {"role": role, "content": word}
        for question, answer in zip(_QUESTIONS, _ANSWERS, strict=True)
        for role, word in (("user", question), ("assistant", answer))
    ]
    try:
        rendered = render_chat(tokenizer, messages, None, "a test conversation")
    except DataError as error:
        if "syntax" in type(error.__cause__).__name__.lower():
            raise DataError(f"the chat template of tokenizer {name} is not valid Jinja: {error.__cause__}") from None
        return
    marked = " ".join(rendered.text[start:stop] for start, stop in rendered.spans)
    if any(word in marked for word in _QUESTIONS) or not any(word in marked for word in _ANSWERS):
        raise DataError(
            f"the {{% generation %}} markers of the chat template of tokenizer {name} mark {marked!r:.60} in a conversation "
            f"whose assistant says {' and '.join(_ANSWERS)}; put them directly around the assistant's text, outside macros and "
            f"set blocks"
        )


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return repr(tokenizer.name_or_path or type(tokenizer).__name__)
