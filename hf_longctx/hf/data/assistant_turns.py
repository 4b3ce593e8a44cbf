"""Finds the assistant's text where a chat template has no `{% generation %}` markers, or refuses a conversation it cannot prove.

The template is rendered a second time with marks: characters for private use, which the loop over the messages prints at the
start of every message, and which stand inside the texts of user, system and tools. Two comparisons prove the result. Without its
marks, the marked text must be the text of the stock template, character by character. And no mark of another speaker's text may
lie in a turn of the assistant. From each turn, the generation prompt is taken off in front (at inference the user's side writes
it), and white space after the end token behind.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection
from typing import Any

Message = dict[str, Any]
# renders a template: messages, whether the generation prompt is added, and the template
Render = Callable[[list[Message], bool, str], str]

# first character of a turn of the assistant, of another turn, of what comes after the loop; inside texts of others
_ASSISTANT, _OTHER, _AFTER, _FOREIGN = "\U000f1f00", "\U000f1f01", "\U000f1f02", "\U000f1f03"
_MARKS = re.compile(f"[{_ASSISTANT}{_OTHER}{_AFTER}{_FOREIGN}]")
# a comment; or a tag, whose quoted texts may contain its end
_TAG = re.compile(r"\{#.*?#\}|\{%[-+]?\s*(\w+)((?:'[^']*'|\"[^\"]*\"|[^'\"])*?)([-+]?)%\}", re.DOTALL)
_TARGET = re.compile(r"\s+(\w+)\s+in\b")


class UnprovenError(ValueError):
    """Raised if the assistant's turns cannot be proven; the message says why, as the end of a sentence."""


def marked_template(template: str) -> str | None:
    """Template that also prints a mark at the start of every message and after the last; None if no loop reads roles.

    Marks stand in tags of their own, which end as the tag before them does, so that Jinja strips the same white space.
    """
    inserts: list[tuple[int, str]] = []
    # open loops: the target, where the body begins, how the tag ends, and how many marks were there before it
    loops: list[tuple[str, int, str, int]] = []
    for tag in _TAG.finditer(template):
        name, inner, end = tag.groups()
        if name == "for":
            target = _TARGET.match(inner)
            loops.append((target.group(1) if target else "", tag.end(), end, len(inserts)))
        elif name == "endfor" and loops:
            target_name, begin, body_end, num_before = loops.pop()
            if target_name and re.search(
                rf"\b{target_name}\s*(\.\s*role\b|\[\s*['\"]role['\"]\s*\])", template[begin : tag.start()]
            ):
                is_assistant = f"{{% if {target_name}['role'] == 'assistant' %}}{_ASSISTANT}{{% else %}}{_OTHER}"
                # a loop inside is part of a message of this one
                inserts[num_before:] = [
                    (begin, f"{is_assistant}{{% endif {body_end}%}}"),
                    (tag.end(), f"{{% if true %}}{_AFTER}{{% endif {end}%}}"),
                ]
    if not inserts:
        return None
    for place, text in sorted(inserts, reverse=True):
        template = template[:place] + text + template[place:]
    return template


def assistant_turns(text: str, messages: list[Message], template: str, render: Render) -> list[tuple[int, int]]:
    """Half-open character spans of what `template` printed for each message of the assistant into `text`.

    Raises UnprovenError unless there is one for each of these messages.
    """
    marked = marked_template(template)
    if marked is None:
        raise UnprovenError("no loop of it reads the roles of messages")
    marked_text = "" if _MARKS.search(text) else render(_with_marks(messages), False, marked)
    if _MARKS.sub("", marked_text) != text:
        raise UnprovenError("it does not give the same text when marks stand between the messages and inside their texts")
    turns = _turns(marked_text)
    num_spoken = sum(message["role"] == "assistant" for message in messages)
    if len(turns) != num_spoken:
        raise UnprovenError(f"{num_spoken} messages of the assistant give {len(turns)} pieces of text")
    return turns


def assistant_spans(
    text: str, messages: list[Message], template: str, render: Render, end_tokens: Collection[str]
) -> list[tuple[int, int]]:
    """Half-open character spans of what the assistant says in `text`, which `template` made of `messages`.

    Raises UnprovenError unless every turn of the assistant is found in this text, begins with the generation prompt and ends
    with one of `end_tokens`.
    """
    turns = assistant_turns(text, messages, template, render)
    if not turns:
        return []
    spoken = [message for message in messages if message["role"] == "assistant"]
    prompt = _generation_prompt(text, turns[0][0], messages, template, render)
    return [_without_ends(text, turn, prompt, message, end_tokens) for turn, message in zip(turns, spoken, strict=True)]


def learnt_spans(spans: list[tuple[int, int]], are_learnt: list[bool], turns: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans inside turns that are learnt; raises UnprovenError for a span that is in no turn, or in several."""
    kept = []
    for start, stop in spans:
        owners = [number for number, (begin, end) in enumerate(turns) if begin < stop and start < end]
        if len(owners) != 1:
            raise UnprovenError(f"what it marks as said by the assistant ({start} to {stop}) is not in one message")
        if are_learnt[owners[0]]:
            kept.append((start, stop))
    return kept


def _with_marks(messages: list[Message]) -> list[Message]:
    """Copies the messages, with a mark in the middle of every text that is not the assistant's."""
    messages = copy.deepcopy(messages)
    for message in messages:
        if message["role"] == "assistant":
            continue
        content = message.get("content")
        if isinstance(content, str):
            message["content"] = _with_mark(content)
        for part in content if isinstance(content, list) else ():
            part["text"] = _with_mark(part["text"])
    return messages


def _with_mark(text: str) -> str:
    # in the middle, since templates strip texts and ask what they begin and end with; not in empty ones, which stay empty
    core = text.strip()
    middle = text.find(core) + len(core) // 2
    return text[:middle] + _FOREIGN + text[middle:] if core else text


def _turns(marked_text: str) -> list[tuple[int, int]]:
    """Spans of the assistant's turns, as places in the text without marks; turns without text are left out."""
    turns: list[tuple[int, int]] = []
    begin, is_assistant, num_marks, has_foreign = 0, False, 0, False
    for mark in _MARKS.finditer(marked_text):
        place = mark.start() - num_marks
        num_marks += 1
        if mark.group() == _FOREIGN:
            has_foreign = True
            continue
        if is_assistant and begin < place:
            if has_foreign:
                raise UnprovenError("it puts what others say into a turn of the assistant")
            turns.append((begin, place))
        begin, is_assistant, has_foreign = place, mark.group() == _ASSISTANT, False
    return turns


def _generation_prompt(text: str, start: int, messages: list[Message], template: str, render: Render) -> str:
    """Text that the template adds for the assistant to go on from; `start` is where its first turn begins in `text`."""
    first = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    # where nobody has asked, the prompt after the last message has to do
    asked, before = (messages[:first], text[:start]) if first else (messages, text)
    prompted = render(asked, True, template)
    if not prompted.startswith(before):
        raise UnprovenError("with a generation prompt it changes the text before it")
    return prompted[len(before) :]


def _without_ends(
    text: str, turn: tuple[int, int], prompt: str, message: Message, end_tokens: Collection[str]
) -> tuple[int, int]:
    start, stop = turn
    own = text[start:stop]
    content = message.get("content")
    spoken = content.strip() if isinstance(content, str) else ""
    if not own.startswith(prompt) or not (prompt or (spoken and own.lstrip().startswith(spoken))):
        raise UnprovenError(
            f"a turn of the assistant begins with {own[:40]!r}, and not with its generation prompt {prompt!r:.60}"
        )
    if not own.rstrip().endswith(tuple(end_tokens)):
        raise UnprovenError(f"a turn of the assistant ends with {own[-40:]!r}, and not with a special token")
    return start + len(prompt), start + len(own.rstrip())
