"""Turns conversations into text: checks messages, renders them with the chat template, and finds the assistant's text.

Called by `tokenise_chat`. The assistant's text is everything that the template puts between `{% generation %}` and
`{% endgeneration %}`, as character spans. A stock template without these markers is replaced by TRL's training template if TRL is
installed and has one.

transformers can derive a token mask from these spans (`return_assistant_tokens_mask`), but that mask drops the last bytes of a
character of several tokens, and everything after a span that starts or ends in white space without a token. So only the spans
come from transformers' renderer, and `tokenise.py` maps them to tokens with the tokenizer's offsets.

Without markers, `assistant_turns` finds the text and proves it, or the conversation is refused. The template is rendered a second
time with marks: characters for private use, printed by the loop over the messages at the start of every message, and inserted
into the texts of user, system and tools. Two comparisons prove the result: without marks, the marked text must equal the stock
template's text, and no mark of another speaker's text may be in a turn of the assistant. From each turn, the generation prompt at
its start is removed (at inference it is part of the prompt), and white space after the end token.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import datasets
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hf_longctx.hf.data.fields import argument_problem, field_problem, part_problem, teaches, template_problem
from hf_longctx.hf.ranks.exit_message import RefusedRun
from hf_longctx.hf.ranks.launch import on_first_rank

Message = dict[str, Any]
# (messages, whether to add the generation prompt, template) -> text
Render = Callable[[list[Message], bool, str], str]

# marks at the start of an assistant's turn, of another turn, and of what follows the loop; mark inside texts of others
_ASSISTANT, _OTHER, _AFTER, _FOREIGN = "\U000f1f00", "\U000f1f01", "\U000f1f02", "\U000f1f03"
_MARKS = re.compile(f"[{_ASSISTANT}{_OTHER}{_AFTER}{_FOREIGN}]")
# a comment; or a tag, whose quoted texts may contain its end
_TAG = re.compile(r"\{#.*?#\}|\{%[-+]?\s*(\w+)((?:'[^']*'|\"[^\"]*\"|[^'\"])*?)([-+]?)%\}", re.DOTALL)
_TARGET = re.compile(r"\s+(\w+)\s+in\b")


class UnprovenError(ValueError):
    """Raised if the assistant's turns cannot be proven; the message gives the reason, as the end of a sentence."""


def marked_template(template: str) -> str | None:
    """Makes a template that also prints a mark at the start of every message and after the last; None if no loop reads roles.

    Marks have separate tags, which end like the tag before them, so that Jinja strips the same white space.
    """
    inserts: list[tuple[int, str]] = []
    # open loops: (target, start of the body, end of the tag, number of marks before it)
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
                # a nested loop is part of a message of this one
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
    """Returns half-open character spans of `text` that `template` printed for each message of the assistant.

    Raises UnprovenError unless there is one per message.
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
    """Returns half-open character spans of what the assistant says in `text`, which `template` made from `messages`.

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
    """Returns the spans inside learnt turns; raises UnprovenError for a span that is not inside exactly one turn."""
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
            if "text" in part:
                part["text"] = _with_mark(part["text"])
    return messages


def _with_mark(text: str) -> str:
    # in the middle, since templates strip texts and test how they begin and end; not in empty ones, which stay empty
    core = text.strip()
    middle = text.find(core) + len(core) // 2
    return text[:middle] + _FOREIGN + text[middle:] if core else text


def _turns(marked_text: str) -> list[tuple[int, int]]:
    """Returns spans of the assistant's turns in the text without marks; skips turns without text."""
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
    """Returns the generation prompt of the template; `start` is the start of the assistant's first turn in `text`."""
    first = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    # if the conversation begins with the assistant, use the prompt after the last message
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


logger = logging.getLogger(__name__)
logger.addFilter(on_first_rank)


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
# most seconds for rendering one conversation
_MOST_SECONDS = 30.0
_QUESTIONS, _ANSWERS = ("Zebra", "Quagga"), ("Marmot", "Lemur")


class DataError(RefusedRun):
    """Raised for data or a tokenizer that cannot be used; the message says what was found, what is allowed, what to do."""


class _TooLong(Exception):
    """Raised inside a template that renders for too long."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A document and the half-open character spans in it to learn."""

    text: str
    spans: tuple[tuple[int, int], ...]


def as_written(value: Any, feature: Any) -> Any:
    """Removes from a value of a column with this feature the keys that Arrow added to structs because other rows have them.

    Nulls in `Json` of `datasets` come from the file. A key that is null in every row was written as null.
    """
    if isinstance(feature, dict) and isinstance(value, dict):
        is_written = {key: item is not None or getattr(feature.get(key), "dtype", None) == "null" for key, item in value.items()}
        return {key: as_written(item, feature.get(key)) for key, item in value.items() if is_written[key]}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        return [as_written(item, inner) for item in value]
    return value


def keeps_nulls(dataset: datasets.Dataset) -> bool:
    """Whether nulls in structs come from a file: from JSON, `datasets` makes structs only of objects with equal keys."""
    return dataset.info.builder_name == "json" and hasattr(datasets, "Json")


def read_messages(value: Any, row: str, has_images: bool = False) -> list[Message]:
    """Checks the messages of one row and returns them in the form that chat templates expect.

    row: name of the row in error messages. A message is {role, content, ...} or ShareGPT's {from, value}, whose speaker is
    translated to a role. Content is text, a list of {type: text} parts, or absent (in tool calls). Keys with the value None are
    dropped, as by `apply_chat_template`. has_images: there may be parts {type: image, ...} and {type: video, ...},
    too. Raises DataError for anything else.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{row} holds {value!r:.60}, expected a list of messages like [{{role: user, content: ...}}, ...]")
    messages = []
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise DataError(f"{row} message {number} is {item!r:.60}, expected {{role: ..., content: ...}}")
        given = {key: each for key, each in item.items() if each is not None}
        messages.append(_read_message(given, f"{row} message {number}", has_images))
    return messages


def read_tools(value: Any, row: str) -> list[dict[str, Any]] | None:
    """Returns the tools of a row (a list of JSON schemas, or such a list as JSON text), or None if it has none."""
    value = _parsed(value, row, "tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{row} has the tools {value!r:.60}, expected a list of tool schemas")
    return value


def read_template_kwargs(value: Any, row: str) -> dict[str, Any]:
    """Returns the variables that a row gives to the chat template (a mapping, or one as JSON text), as TRL reads them."""
    value = _parsed(value, row, "chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise DataError(f"{row} has the chat_template_kwargs {value!r:.60}, expected a mapping of names to values")
    if problem := argument_problem(value, row):
        raise DataError(problem)
    return value


def _parsed(value: Any, row: str, name: str) -> Any:
    """Parses JSON text; returns other values unchanged."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{row} has {name} that are not valid JSON ({error}); correct the text") from None


def chat_tokenizer(tokenizer: PreTrainedTokenizerBase, with_tools: bool = False) -> PreTrainedTokenizerBase:
    """Returns the tokenizer, or a copy with TRL's training template, whose template must locate the assistant's text.

    Renders a short conversation to check that the assistant's words are found and not the user's. Raises DataError for a
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
        if problem := template_problem(template):
            raise DataError(f"the chat template of tokenizer {name} is not rendered: {problem}; correct it, or set another one")
        if not _MARKER.search(template) and marked_template(template) is None:
            raise DataError(
                f"the chat template of tokenizer {name} has no {{% generation %}} marker, and no loop in it reads the roles of "
                f"messages, so it cannot say which tokens are the assistant's; {_REMEDY}"
            )
        _probe(tokenizer, name)
    return tokenizer


def with_training_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Returns a copy of the tokenizer with TRL's training template if TRL is installed and has one, else the tokenizer.

    These templates have markers, and render some conversations differently than the stock template (which is logged):
    thinking, for example, stays in all turns, so that the text of a conversation does not change when it continues.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or _MARKER.search(template) or importlib.util.find_spec("trl") is None:
        return tokenizer
    from trl.chat_template_utils import get_training_chat_template

    try:
        training_template = get_training_chat_template(tokenizer)
    # TRL has no training template for it, or the template cannot render TRL's test conversation
    except (ValueError, TypeError, TemplateError):
        return tokenizer
    if training_template is None:
        return tokenizer
    logger.warning("tokenizer %s: the stock chat template is replaced by TRL's training template for it", _name(tokenizer))
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = training_template
    return tokenizer


def check_offsets(tokenizer: PreTrainedTokenizerBase, purpose: str) -> None:
    """Raises DataError unless the tokenizer gives the characters of each token. purpose: what needs this."""
    if not tokenizer.is_fast:
        raise DataError(
            f"tokenizer {_name(tokenizer)} ({type(tokenizer).__name__}) is written in Python and does not know which characters "
            f"a token covers, so it cannot say {purpose}; use a fast tokenizer (one with a tokenizer.json)"
        )


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    row: str,
    variables: Mapping[str, Any] | None = None,
    limit: RenderLimit | None = None,
) -> RenderedText:
    """Renders a conversation like `tokenizer.apply_chat_template`, and finds the spans of text to learn.

    These are the assistant's, except turns with flags against learning. variables: template variables of the row. limit: ends
    renderings that take too long. Raises DataError for a conversation that the template cannot render, that has fields which
    nothing reads, or whose turns are neither marked nor proven.
    """
    if limit is None:
        with RenderLimit() as limit:
            return render_chat(tokenizer, messages, tools, row, variables, limit)
    template = tokenizer.get_chat_template(None, tools)
    are_learnt = _learnt_turns(messages, template, row)

    def render(some: list[Message], is_prompted: bool, other: str) -> str:
        return _rendered(tokenizer, some, tools, row, variables, limit, chat_template=other, add_generation_prompt=is_prompted)[0]

    try:
        if _MARKER.search(template):
            text, spans = _rendered(
                tokenizer, messages, tools, row, variables, limit, chat_template=template, return_assistant_tokens_mask=True
            )
            if not all(are_learnt):
                spans = learnt_spans(spans, are_learnt, assistant_turns(text, messages, template, render))
            return RenderedText(text, tuple((start, stop) for start, stop in spans if start < stop))
        text = render(messages, False, template)
        added = [each.content for each in tokenizer.added_tokens_decoder.values() if each.special]
        end_tokens = {*tokenizer.all_special_tokens, *added}
        spans = assistant_spans(text, messages, template, render, end_tokens)
        return RenderedText(text, tuple(span for span, is_learnt in zip(spans, are_learnt, strict=True) if is_learnt))
    except UnprovenError as error:
        start = f"{row}: the chat template of tokenizer {_name(tokenizer)}"
        if _MARKER.search(template):
            raise DataError(
                f"{start} cannot say to which turn a flag belongs: {error}; remove the flags, or give tokens with labels of your "
                f"own"
            ) from None
        raise DataError(
            f"{start} has no {{% generation %}} marker, and what the assistant says cannot be proven without one: {error}; "
            f"{_REMEDY}"
        ) from None


def _learnt_turns(messages: list[Message], template: str, row: str) -> list[bool]:
    """Whether each turn of the assistant is learnt."""
    are_learnt = []
    for number, message in enumerate(messages):
        where = f"{row} message {number}"
        if problem := field_problem(message, template, where) or part_problem(message, where):
            raise DataError(problem)
        is_learnt, problem = teaches(message, where)
        if problem:
            raise DataError(problem)
        if message["role"] == "assistant":
            are_learnt.append(is_learnt is not False)
    return are_learnt


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    row: str,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Renders a conversation like `tokenizer.apply_chat_template`."""
    template = tokenizer.get_chat_template(None, tools)
    with RenderLimit() as limit:
        return _rendered(tokenizer, messages, tools, row, variables, limit, chat_template=template)[0]


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    row: str,
    variables: Mapping[str, Any] | None,
    limit: RenderLimit,
    **settings: Any,
) -> tuple[str, list[tuple[int, int]]]:
    """Renders messages with these settings; returns the text, and the assistant's spans if a mask was requested."""
    own = {"conversations": [messages], "tools": tools, **settings}
    arguments: dict[str, Any] = {**tokenizer.special_tokens_map, **(variables or {}), **own}
    try:
        with limit.one():
            # annotated as returning only text, but returns spans too with a mask
            rendered: Any = render_jinja_template(**arguments)
    # a template is somebody else's program, and may raise anything
    except Exception as error:
        said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        if isinstance(error, _TooLong):
            said = f"it takes longer than {_MOST_SECONDS:g} s"
        raise DataError(
            f"{row}: the chat template of tokenizer {_name(tokenizer)} cannot render it: {said:.300}; correct the conversation "
            f"or chat_template"
        ) from error
    (text,), spans = rendered
    return text, spans[0] if spans else []


class RenderLimit:
    """Context that ends renderings of more than `_MOST_SECONDS` by raising _TooLong in their thread, after any call of C code.

    One thread watches all renderings in the context, since starting a thread takes as long as several renderings.
    """

    def __init__(self) -> None:
        self._thread_id = ctypes.c_ulong(threading.get_ident())
        self._lock, self._has_ended = threading.Lock(), threading.Event()
        # time limit of the running rendering; None between renderings
        self._deadline: float | None = None
        self._is_late = False

    def __enter__(self) -> RenderLimit:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Context of one rendering."""
        self._deadline = time.monotonic() + _MOST_SECONDS
        try:
            yield
        finally:
            with suppress(_TooLong):
                with self._lock:
                    self._deadline = None
                # If it has been set and not raised yet, it is raised here. Taking it back instead would leave a flag behind that
                # stops every thread that is traced or profiled (Python 3.11).
                for _ in range(100):
                    pass
            with self._lock:
                self._deadline, self._is_late = None, False

    def _watch(self) -> None:
        while not self._has_ended.wait(_MOST_SECONDS / 10):
            with self._lock:
                if self._deadline is not None and time.monotonic() > self._deadline and not self._is_late:
                    self._is_late = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread_id, ctypes.py_object(_TooLong))


def _read_message(message: Message, where: str, has_images: bool) -> Message:
    if "from" in message:
        speaker, value = message.pop("from"), message.pop("value", None)
        if not isinstance(speaker, str) or speaker not in _ROLES:
            raise DataError(
                f"{where} is from the unknown speaker {speaker!r:.60}; use one of {', '.join(_ROLES)}, or give role and content"
            )
        as_role = {"role": _ROLES[speaker]} | ({} if value is None else {"content": value})
        if differing := [name for name, own in as_role.items() if message.get(name, own) != own]:
            name = differing[0]
            raise DataError(
                f"{where} has the {name} {message[name]!r:.60}, but by from and value it is {as_role[name]!r:.60}; keep one form"
            )
        message = as_role | message
    if not isinstance(message.get("role"), str):
        raise DataError(f"{where} is {message!r:.60}, expected {{role: ..., content: ...}} or {{from: ..., value: ...}}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(_is_part(part, has_images) for part in content):
            image = ", {type: image} or {type: video}" if has_images else ""
            other = "" if has_images else "; for images, tokenise with the model's processor in place of its tokenizer"
            raise DataError(
                f"{where} has the content {content!r:.60}, expected text or parts of {{type: text, text: ...}}{image}{other}"
            )
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise DataError(f"{where} has the content {content!r:.60}, expected text (only tool calls may have none)")
    return message


def _is_part(part: Any, has_images: bool) -> bool:
    """Whether this is a part of a content that templates render."""
    if not isinstance(part, dict):
        return False
    return (part.get("type") == "text" and isinstance(part.get("text"), str)) or (
        has_images and part.get("type") in ("image", "video")
    )


def _probe(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Renders two turns of known words; raises DataError if the markers enclose the wrong ones.

    A template may refuse this test conversation for other reasons; then only the real conversations are checked.
    """
    messages = [
        {"role": role, "content": word}
        for question, answer in zip(_QUESTIONS, _ANSWERS, strict=True)
        for role, word in (("user", question), ("assistant", answer))
    ]
    try:
        rendered = render_chat(tokenizer, messages, None, "a test conversation")
    except DataError as error:
        if isinstance(error.__cause__, _TooLong):
            raise
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
