"""Defines the meaning of every message field and row column, and decides which are read, ignored or refused.

`docs/reference/data-fields.md` is generated from these tables. A field or column outside of them is refused if it could change
the text or the learnt tokens: by words in its name, by the shape of its values, or if the chat template reads a variable of its
name. Others, such as `id` and `source`, are logged once as not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import jinja2
import pyarrow as pa
from jinja2 import meta, nodes

from hf_longctx.hf.data.labels import LOSS_WEIGHTS
from hf_longctx.hf.models.facts import TOKEN_TYPES, TokenTypes

# columns of tokenised rows with their images and videos: places among the tokens, and files
MEDIA, MEDIA_FILES = "media", "media_files"

# text: templates may print it; flag: whether a turn is learnt; note: nothing reads it
FieldUse = Literal["text", "flag", "note", "refused"]
# "refused if not empty": refused in rows in which the column has a value
ColumnUse = Literal["read", "not read", "refused", "refused if not empty"]


@dataclass(frozen=True, slots=True)
class MessageField:
    """Meaning of a message field. learns_others: the flag's tool applies it to turns of every speaker."""

    use: FieldUse
    meaning: str
    learns_others: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """Meaning of a column in rows of tokens, or in rows of conversations."""

    use: ColumnUse
    meaning: str


MESSAGE_FIELDS: dict[str, MessageField] = {
    "role": MessageField("text", "who speaks"),
    "content": MessageField("text", "what is said: text, or parts `{type: text, text: ...}`; only tool calls may have none"),
    "from": MessageField("text", "ShareGPT's name of `role`: human, user, gpt, assistant, system or tool"),
    "value": MessageField("text", "ShareGPT's name of `content`"),
    "tool_calls": MessageField("text", "calls of tools"),
    "tool_call_id": MessageField("text", "the call that a message of a tool answers"),
    "name": MessageField("text", "the name of a speaker or tool"),
    "reasoning_content": MessageField("text", "the assistant's thoughts"),
    "reasoning": MessageField("text", "transformers' other name of `reasoning_content`"),
    "thinking": MessageField("text", "transformers' other name of `reasoning_content`"),
    "weight": MessageField("flag", "OpenAI, Mistral, SlimOrca"),
    "loss_weight": MessageField("flag", "LLaMA-Factory", learns_others=True),
    "loss_scale": MessageField("flag", "ms-swift"),
    "loss": MessageField("flag", "ms-swift", learns_others=True),
    "loss_mask": MessageField("flag", "verl and others", learns_others=True),
    "train": MessageField("flag", "axolotl", learns_others=True),
    "training": MessageField("flag", "axolotl", learns_others=True),
    "trainable": MessageField("flag", "Tinker", learns_others=True),
    "train_detail": MessageField("refused", "axolotl's parts of a turn that are learnt"),
    "training_detail": MessageField("refused", "axolotl's parts of a turn that are learnt"),
    **{
        name: MessageField("note", "about the message, not in it")
        for name in (
            *("id", "uuid", "message_id", "msg_id", "parent_id", "parent", "children", "turn", "turn_id", "turn_identifier"),
            *("index", "idx", "timestamp", "time", "date", "created", "created_at", "create_time", "language", "lang", "model"),
            *("model_name", "source", "score", "rating", "rank", "emoji", "emojis", "toxic", "redacted", "state", "country"),
            *("hashed_ip", "header", "metadata", "meta", "extra", "extra_info", "annotations", "refusal", "audio"),
            *("finish_reason", "usage", "logprobs", "num_tokens", "token_count", "length", "tags", "topic", "category", "user"),
            *("author", "end_turn", "recipient", "channel", "status", "review_count", "review_result", "deleted", "detoxify"),
        )
    },
}

_NOT_TOKENS = "express it in 'labels' (-100 for no label) with one document per row, or remove the column"
_NOT_WEIGHTS = (
    f"give one weight per token in a column {LOSS_WEIGHTS!r} (float, 0 or more, beside its label), or remove the column"
)

TOKEN_COLUMNS: dict[str, Column] = {
    "input_ids": Column("read", "token ids"),
    "labels": Column("read", "one label per token, -100 for none; without the column every token is learnt"),
    LOSS_WEIGHTS: Column("read", "one weight per label"),
    "attention_mask": Column("read", "0 for padding at the ends of a row, which is left out"),
    "position_ids": Column("read", "positions that begin with 0 again in every document of a row"),
    "seq_lengths": Column("read", "the number of tokens of every document of a row"),
    MEDIA: Column("read", "where the tokens of a row's images are, as `tokenise_chat` writes it with a processor"),
    MEDIA_FILES: Column("read", "a path or a file's content for each of these images"),
    **{
        name: Column("not read", "what tokenizers return beside tokens")
        for name in (
            *("special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "num_truncated_tokens"),
            *("length", "word_ids"),
        )
    },
    TOKEN_TYPES: Column("not read", "types of tokens; refused if the model would compute something else by them"),
    **{
        name: Column("refused", _NOT_TOKENS)
        for name in (
            *("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "shift_labels", "completion_mask", "assistant_masks"),
            *("loss_mask", "label", "label_ids", "labels_ids", "inputs_embeds"),
        )
    },
    **{
        name: Column("refused", _NOT_WEIGHTS)
        for name in (
            *("weights", "weight", "loss_weight", "token_weights", "token_weight", "label_weights", "sample_weight"),
            *("sample_weights", "loss_scale", "importance_weights"),
        )
    },
}

# columns whose names mean weights
WEIGHTS = tuple(name for name, column in TOKEN_COLUMNS.items() if column.meaning == _NOT_WEIGHTS)

_GIVE_SYSTEM = "give it as the first message, with the role system"
# columns with the images of a row
IMAGE_COLUMNS = ("images", "image")
# columns with the videos of a row
VIDEO_COLUMNS = ("videos", "video")
_MEDIA_REMEDY = (
    "tokenise_chat and tokenise_completions read images of the columns 'images' and 'image', and videos of 'videos' and 'video', "
    "with the model's processor in place of its tokenizer; leave other rows with images, video or sound out, then remove the "
    "column"
)
CHAT_COLUMNS: dict[str, Column] = {
    "tools": Column("read", "a list of tool schemas, or such a list as JSON text"),
    "chat_template_kwargs": Column("read", "variables of the chat template, as in TRL"),
    **{name: Column("refused if not empty", _GIVE_SYSTEM) for name in ("system", "system_prompt", "system_message")},
    **{
        name: Column("refused if not empty", _MEDIA_REMEDY)
        for name in (*IMAGE_COLUMNS, *VIDEO_COLUMNS, "audio", "audios", "objects")
    },
    **{
        name: Column("refused if not empty", "set the tokenizer's chat_template for all rows, or remove the column")
        for name in ("chat_template", "template", "add_generation_prompt", "continue_final_message")
    },
}
# arguments of `apply_chat_template` that are not template variables
_ARGUMENTS = (
    *("conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
# variables that the renderer itself gives to templates
_GIVEN = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range", "dict")

# words in the names of columns and fields that mean masks, weights and settings
_WORDS = frozenset(
    (
        *("mask", "masks", "masked", "weight", "weights", "weighted", "loss", "losses", "train", "training", "trained"),
        *("trainable", "label", "labels", "kwargs"),
    )
)
# columns of other tools that mask or weigh tokens, with any values
_MEANT = (*WEIGHTS, "loss_mask", "completion_mask", "assistant_masks", "shift_labels", "prompt_mask")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
# columns with inputs of towers for images, sound and video
_PIXELS = re.compile(
    r"(\w+_)?pixel_(values|mask|attention_mask)(_\w+)?|(image|video)_(grid_\w+|grids?|sizes(_videos)?|patches|embeds|position_ids)|"
    r"(audio_)?input_(features|values)(_mask)?|(feature|audio)_attention_mask|audio_(input_ids|embed_sizes|feature_lengths)|"
    r"flattened_patches|protein_input_ids"
)
# words in names of columns with images, video and sound, and the words that such names may have beside them; addresses of the web
# are left out, since corpora of text name pictures by them that no text is about
_MEDIA_WORDS = frozenset(
    (
        *("image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "screenshot", "screenshots", "jpg", "jpeg"),
        *("png", "webp", "video", "videos", "audio", "audios", "wav", "flac", "modal", "multimodal"),
    )
)
_FILE_WORDS = frozenset(
    (
        *("path", "paths", "file", "files", "filename", "filenames", "name", "names", "bytes", "base", "b", "data", "list"),
        *("multi", "column"),
    )
)
# largest factor and exponent allowed in a template; templates only repeat some spaces in this way
_MOST_FACTOR, _MOST_EXPONENT = 1 << 20, 32


def teaches(message: Mapping[str, Any], where: str) -> tuple[bool | None, str]:
    """Returns whether a message is learnt by its flags (None without flags), and the problem with them, if any."""
    found: dict[str, bool] = {}
    for name, field in MESSAGE_FIELDS.items():
        if field.use != "flag" or (value := message.get(name)) is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            return None, (
                f"{where} has {name!r}: {value!r:.60}, expected true or 1 for a turn that is learnt, false or 0 for one that is "
                f"not; for other weights, give tokens with a column {LOSS_WEIGHTS!r}"
            )
        found[name] = bool(value)
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name!r}: {message[name]!r}" for name in found)
        return None, f"{where} has flags that disagree about whether it is learnt ({said}); keep one of them"
    if not found:
        return None, ""
    name, is_learnt = next(iter(found.items()))
    others = [name for name in found if MESSAGE_FIELDS[name].learns_others]
    if is_learnt and others and message.get("role") != "assistant":
        return None, (
            f"{where} has {others[0]!r}: {message[others[0]]!r}, but its role is {message.get('role')!r}, and only turns of the "
            f"assistant are learnt; remove the field, or give tokens with labels of your own"
        )
    return is_learnt, ""


def field_problem(message: Mapping[str, Any], template: str, where: str) -> str:
    """Describes message fields that would be ignored although they may change what is learnt; "" if there are none.

    A field that the template names is text.
    """
    for name, value in message.items():
        field = MESSAGE_FIELDS.get(name)
        if value is None or (field is not None and field.use != "refused"):
            continue
        if field is None and isinstance(name, str) and re.search(rf"\b{re.escape(name)}\b", template):
            continue
        why = f"which is not supported ({field.meaning})" if field else "which the chat template does not read"
        return (
            f"{where} has {name!r}: {value!r:.60}, {why}, and to ignore it might change what is trained; remove the field, or "
            f"give tokens with labels of your own"
        )
    return ""


def part_problem(message: Mapping[str, Any], where: str) -> str:
    """Describes flags against learning in parts of a message's content; "" if there are none."""
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        for name, value in part.items():
            field = MESSAGE_FIELDS.get(name)
            if field is not None and field.use in ("flag", "refused") and value is not None:
                return (
                    f"{where} has a part of its content with {name!r}: {value!r:.60}, but flags belong to whole turns; give "
                    f"tokens with labels of your own"
                )
    return ""


def chat_columns(columns: Mapping[str, bool], read: Collection[str], template: str, name: str) -> tuple[str | None, list[str]]:
    """Returns the problem with the columns of conversations, if there is one, and the columns that nothing reads.

    columns: whether the values of each are text. read: columns of the conversation.
    """
    variables = template_variables(template)
    others = [column for column in columns if column not in read and column not in CHAT_COLUMNS]
    for column in others:
        if column in variables:
            return (
                f"{name} has a column {column!r}, and the chat template reads a variable of this name, which the column does not "
                f"set; write it into a column 'chat_template_kwargs', as {{{column!r}: ...}}, or remove the column"
            ), []
    if problem := named_column_problem({column: columns[column] for column in others}, name):
        return problem, []
    return None, others


def named_column_problem(columns: Mapping[str, bool], name: str, allowed: Collection[str] = ()) -> str | None:
    """Describes a column that by its name masks or weighs what is learnt, unless it holds text; None if there is none.

    columns: whether the values of each are text. allowed: words that are harmless here.
    """
    for column, is_text in columns.items():
        words = [word for word in map(str.lower, _WORD.findall(column)) if word in _WORDS and word not in allowed]
        if words and not (is_text and column not in _MEANT):
            remedy = _NOT_WEIGHTS if words[0].startswith("weight") else _NOT_TOKENS
            return (
                f"{name} has a column {column!r}, which is not read, and to ignore it might change what is trained, as the word "
                f"{words[0]!r} in its name says; {remedy}"
            )
    return None


def unnamed_column_problem(columns: Iterable[Any], name: str) -> str | None:
    """Describes a column whose name is no text; None if there is none."""
    for column in columns:
        if not isinstance(column, str):
            return f"{name} has a column {column!r} ({type(column).__name__}); name columns by texts such as 'input_ids'"
    return None


def token_column_problem(columns: Mapping[str, bool], name: str) -> str | None:
    """Describes a column besides the tokens that would be ignored although it changes training; None if there is none.

    columns: whether the values of each are text.
    """
    if problem := unnamed_column_problem(columns, name):
        return problem
    if refused := [column for column in columns if column in TOKEN_COLUMNS and TOKEN_COLUMNS[column].use == "refused"]:
        return (
            f"{name} has a column {refused[0]!r}, which is not supported, and to ignore it would change what is trained; "
            f"{TOKEN_COLUMNS[refused[0]].meaning}"
        )
    if pixels := tower_columns(columns):
        return (
            f"{name} has a column {pixels[0]!r}, an input for images, sound or video made beforehand, which plans do not read; "
            f"give rows with images to tokenise_chat and the model's processor, or remove such rows, then the column"
        )
    return named_column_problem({column: is_text for column, is_text in columns.items() if column not in TOKEN_COLUMNS}, name)


def token_types_problem(rows: Iterable[Any], name: str, agrees: TokenTypes) -> str | None:
    """Describes a row whose types of tokens the model would read, which plans do not; None without one.

    rows: mappings, or lists of types. agrees: when a model without types computes the same.
    """
    if agrees == "always":
        return None
    for number, row in enumerate(rows):
        types = row.get(TOKEN_TYPES) if isinstance(row, Mapping) else row
        if types is not None and (agrees == "never" or any(types)):
            what = "" if agrees == "never" else ", which are not all 0"
            return (
                f"{name} row {number} has {TOKEN_TYPES!r}{what}, by which the model's class computes something else (tokens that "
                f"see later ones, or other embeddings), and plans do not read them; remove the column, and the model trains as "
                f"without types"
            )
    return None


def listed_column_problem(name: str, lengths: list[int], others: Mapping[str, list[int | None]], per: str) -> str | None:
    """Describes a column with one number per token or message in every row; None if there is none.

    lengths: tokens or messages of some rows. others: for columns that nothing reads, the numbers per row; None for no list.
    """
    for column, found in others.items():
        if lengths and found == lengths and sum(lengths) > len(lengths):
            return (
                f"{name} has a column {column!r} with one number per {per}, which is not read, and to ignore it might change "
                f"what is trained; "
                + (_NOT_WEIGHTS if per == "token" else "write it as a field of the messages, or remove the column")
            )
    return None


def tower_columns(names: Iterable[str]) -> list[str]:
    """Returns the names of inputs of towers for images, sound or video that were made beforehand."""
    return [name for name in names if _PIXELS.fullmatch(name)]


def unread_columns(columns: Iterable[str]) -> list[str]:
    """Returns the columns of rows of tokens that nothing reads and tokenizers do not return."""
    return [column for column in columns if column not in TOKEN_COLUMNS]


def filled_column_problem(row: Mapping[str, Any], messages: list[dict[str, Any]], where: str) -> str | None:
    """Describes a column of a conversation's row whose value would change its text; None if there is none."""
    for column, value in row.items():
        known = CHAT_COLUMNS.get(column)
        if known is None or known.use != "refused if not empty" or _is_empty(value):
            continue
        said = [message.get("content") for message in messages if message.get("role") == "system"]
        if known.meaning == _GIVE_SYSTEM and value in said:
            continue
        return _ignored(column, value, where, known.meaning)
    return None


def media_problem(dataset: datasets.Dataset, read: Collection[str], where: Callable[[int], str]) -> str | None:
    """Describes the first image, video or sound of an Arrow dataset that would be ignored; None if there is none.

    Reads rows up to the first value that is not empty. read: columns that are read. where: the name of a row by its place.
    """
    for column in dataset.column_names:
        if column in read or not _holds_media(column, dataset.data.schema.field(column).type):
            continue
        place = 0
        for table in dataset.select_columns([column]).with_format("arrow").iter(64):
            for item in table[column]:
                if not _is_empty(value := item.as_py()):
                    return _ignored(column, value, where(place), _MEDIA_REMEDY)
                place += 1
    return None


def _holds_media(name: str, kind: pa.DataType) -> bool:
    """Whether a column may hold images, video or sound: by its name, or as files of `datasets`, which have a path and bytes."""
    if _PIXELS.fullmatch(name) or _holds_files(kind):
        return True
    words = {word.lower() for word in _WORD.findall(name)}
    # single numbers are counts
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return bool(words & _MEDIA_WORDS) and words <= _MEDIA_WORDS | _FILE_WORDS and not is_number


def _holds_files(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        names = {field.name for field in kind}
        return names >= {"path", "bytes"} or any(_holds_files(field.type) for field in kind)
    inner = _inner(kind)
    return inner is not None and _holds_files(inner)


def _is_empty(value: Any) -> bool:
    """Whether a value says nothing: missing, false, or a list or dict of such values."""
    if isinstance(value, list | dict):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    return not value


def _ignored(column: str, value: Any, where: str, remedy: str) -> str:
    return f"{where} has {column!r}: {value!r:.60}, which is not read, and to ignore it would change the text; {remedy}"


def argument_problem(given: Mapping[str, Any], where: str) -> str | None:
    """Describes names in `chat_template_kwargs` that are no template variables; None if there are none."""
    if wrong := [name for name, value in given.items() if name in _ARGUMENTS and value not in (None, False)]:
        return (
            f"{where} has chat_template_kwargs with {wrong[0]!r}: {given[wrong[0]]!r:.60}, which is no variable of a template; "
            f"leave it out" + ("; give tools in a column 'tools'" if wrong[0] == "tools" else "")
        )
    return None


def template_variables(template: str) -> set[str]:
    """Returns the variables that a chat template reads besides the renderer's own; empty for an invalid template."""
    tree = _parsed(template)
    return set() if tree is None else meta.find_undeclared_variables(tree) - set(_GIVEN)


def template_problem(template: str) -> str | None:
    """Describes a number in a template with which rendering could fill the memory; None if there is none."""
    tree = _parsed(template)
    for node in () if tree is None else tree.find_all((nodes.Mul, nodes.Pow)):
        if (factor := _factor(node)) == math.inf or (isinstance(node, nodes.Mul) and factor > _MOST_FACTOR):
            return f"it multiplies by more than {_MOST_FACTOR:,}"
    return None


def _factor(node: nodes.Node) -> float:
    """Returns the value of an expression of constants; 1 for variables and texts, infinity for powers without a bound."""
    if isinstance(node, nodes.Const):
        return abs(node.value) if isinstance(node.value, int | float) else 1
    if isinstance(node, nodes.Mul):
        return _factor(node.left) * _factor(node.right)
    if isinstance(node, nodes.Pow):
        is_known = isinstance(node.left, nodes.Const) and isinstance(node.right, nodes.Const)
        base, exponent = _factor(node.left), _factor(node.right)
        return base**exponent if is_known and base <= _MOST_FACTOR and exponent <= _MOST_EXPONENT else math.inf
    return 1


def _parsed(template: str) -> nodes.Template | None:
    # transformers' own tags enclose what is learnt, and name no variables
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return environment.parse(_GENERATION.sub("", template))
    except (jinja2.TemplateError, RecursionError):
        return None


def text_columns(dataset: datasets.Dataset) -> dict[str, bool]:
    """Returns whether each column of an Arrow dataset holds text, or nothing at all."""
    return {name: _is_text(dataset.data.schema.field(name).type) for name in dataset.column_names}


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
        return True
    inner = _inner(kind)
    return inner is not None and _is_text(inner)


def _inner(kind: pa.DataType) -> pa.DataType | None:
    """The type of a list's items; None for types that are no lists."""
    inner = getattr(kind, "value_type", None)
    # arrays of `datasets` name their numbers there
    return inner if isinstance(inner, pa.DataType) and not pa.types.is_dictionary(kind) else None


def is_text(value: Any) -> bool:
    """Whether a value of a row is text, a list of texts, or missing."""
    return value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
