"""Reads the settings of a recipe: one YAML file, then `--key value` pairs that override it.

`HfArgumentParser` checks them, but it reads either a file or a command line. So the file's entries are put in front of the
command line: argparse then checks names, types and choices of both, and what comes later wins. A DeepSpeed configuration
(`deepspeed`: a path, or the block itself) is translated, and its settings stand before those of the file.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Hashable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from hf_longctx.hf.rules.deepspeed import differing, from_deepspeed
from hf_longctx.plan.core.messages import shortened, shown

# settings whose value may be a path that starts with recipes/, which outside the repository is looked up in the package, as are
# paths in the entries of `datasets`
_PATHS = ("model_name_or_path", "tokenizer", "chat_template", "dataset")

# bytes of the largest file of settings, and most values in one with its aliases written out
_MOST_BYTES, _MOST_VALUES = 2**20, 100_000


def read_settings(dataclasses: tuple[type, ...], arguments: list[str] | None = None) -> tuple[Any, ...]:
    """Reads one instance of each dataclass from the words `[CONFIG.yaml] [--key value ...]` (default: the command line).

    Exits with argparse's message for an unknown key, a wrong type or a wrong choice.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0].endswith((".yaml", ".yml")):
        words = [*_words_of_file(Path(words[0])), *words[1:]]
    elif late := [word for word in words if word.endswith((".yaml", ".yml"))]:
        raise SystemExit(f"{late[0]} comes after other settings; give the YAML file first")
    source, words = _without_deepspeed(words)
    found = None
    if source is not None:
        try:
            found = from_deepspeed(source, has_stages=given_settings(words).get("stages", "1") != "1")
        except ValueError as error:
            raise SystemExit(f"settings: deepspeed: {error}") from None
        # own settings come later; those that differ are refused below
        words = [*_words_of({**found.config, **found.arguments}), *words]
    if empty := next((word for word in words if word.startswith("--") and word.endswith("=--")), None):
        # argparse would leave the value out and hand on an empty list
        raise SystemExit(f"settings: {empty.removesuffix('=--')} has the value '--'; give another, or leave it out")
    parser = _Parser(dataclasses, allow_abbrev=False)
    try:
        *settings, unknown = parser.parse_args_into_dataclasses(
            args=words, look_for_args_file=False, return_remaining_strings=True
        )
    except ValueError as error:
        # a dataclass refused its values with a message for the user, who does not need the traceback
        raise SystemExit(f"settings: {error}") from error
    except (TypeError, OverflowError) as error:
        # transformers converts some numbers without a check
        pairs = [*pairwise(words), *(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)]
        infinite = [name for name, word in pairs if _is_infinite(word)]
        raise SystemExit(f"settings: {error}; check {', '.join(infinite) or 'the numbers'}") from error
    if unknown and (unknown[0] == "--" or not unknown[0].startswith("--")):
        before = words[: words.index(unknown[0])]
        name = next((word for word in reversed(before) if word.startswith("--")), "the settings")
        raise SystemExit(f"settings: {shown(unknown[0])} follows the one value that {name} takes; leave it out")
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0], known, n=3)
        raise SystemExit(f"unknown setting {shown(unknown[0])}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    if found is not None:
        values = {name: value for each in settings for name, value in vars(each).items()}
        if problems := differing({**found.config, **found.arguments}, values):
            raise SystemExit("settings: deepspeed: " + "\n".join(problems))
    return tuple(settings)


def _without_deepspeed(words: list[str]) -> tuple[str | None, list[str]]:
    """Returns the last value of the setting `deepspeed`, a path or JSON, and the other words; None without that setting.

    `TrainingArguments` has a field of this name, which asks for DeepSpeed itself.
    """
    source, rest = None, []
    following = iter(words)
    for word in following:
        name, sign, value = word.partition("=")
        if name != "--deepspeed":
            rest.append(word)
        else:
            source = value if sign else next(following, "")
    return source, rest


def given_settings(arguments: list[str] | None = None) -> dict[str, str]:
    """First word of every setting that the words `[CONFIG.yaml] [--key value ...]` give (default: the command line).

    The last of several wins; a setting without a word, which is a flag, gets "true".
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0].endswith((".yaml", ".yml")):
        words = [*_words_of_file(Path(words[0])), *words[1:]]
    given = {}
    for word, following in pairwise([*words, "--"]):
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            given[name.replace("-", "_")] = value if sign else "true" if following.startswith("--") else following
    return given


def _is_infinite(word: str) -> bool:
    try:
        return math.isinf(float(word))
    except ValueError:
        return False


class _Parser(HfArgumentParser):
    """Prints errors in one line, because the usage text of some two hundred settings would bury them."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(f"settings: {' '.join(shortened(message).split())} (--help lists all settings)")


class _Settings(yaml.SafeLoader):
    """Loads YAML, and refuses keys that occur twice, which PyYAML would silently take, and values that aliases make endless."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _num_nodes(node, {}) > _MOST_VALUES:
            raise yaml.composer.ComposerError(None, None, f"aliases make more than {_MOST_VALUES:,} values", node.start_mark)
        return node


def _num_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of values in a node with every alias written out, at most one more than are allowed."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        # a node that contains itself has no end
        known[id(node)] = _MOST_VALUES + 1
        children = [child for each in node.value for child in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = min(_MOST_VALUES + 1, 1 + sum(_num_nodes(child, known) for child in children))
    return known[id(node)]


def _words_of_file(path: Path) -> list[str]:
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; give a YAML file with one setting per line, for example max_length: 4096")
    if path.stat().st_size > _MOST_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size:,} bytes; a file of settings has at most {_MOST_BYTES:,}")
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader=_Settings) or {}
    except RecursionError:
        raise SystemExit(f"{path} is nested too deeply; give one `key: value` per line") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        # PyYAML makes numbers and dates with Python's own constructors, and does not explain their errors
        raise SystemExit(f"{path} is not YAML that can be read: {' '.join(shortened(str(error)).split())}") from None
    if not isinstance(settings, dict):
        raise SystemExit(f"{path}: expected one `key: value` per line, found a {type(settings).__name__}")
    try:
        return _words_of(settings)
    except (TypeError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from None


def _words_of(settings: Mapping[str, Any]) -> list[str]:
    """The words of a command line that gives these settings; raises ValueError for a value without words."""
    words: list[str] = []
    for key, value in settings.items():
        # a setting without a value keeps its default
        if value is not None:
            try:
                values = [_shipped(word) if key in _PATHS else word for word in _words_of_value(_with_paths(value))]
            except (TypeError, ValueError) as error:
                raise ValueError(f"{shown(key)} holds a value that is no text, number or list: {error}") from None
            # argparse would take a value like --- for a setting
            words += [f"--{key}={values[0]}"] if len(values) == 1 and values[0].startswith("-") else [f"--{key}", *values]
    return words


def _words_of_value(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [json.dumps(value)]
    if isinstance(value, list):
        return [word for item in value for word in _words_of_value(item)]
    return [str(value)]


def _with_paths(value: Any) -> Any:
    """A setting whose entries with a `path`, as in `datasets`, name files that are there."""
    if isinstance(value, list):
        return [_with_paths(entry) for entry in value]
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        return {**value, "path": _shipped(value["path"])}
    return value


def _shipped(path: str) -> str:
    """Resolves `recipes/...` inside the package if it is not in the current folder; returns any other path as it is."""
    shipped = Path(__file__).parent / Path(path).relative_to("recipes") if path.startswith("recipes/") else None
    return str(shipped) if shipped is not None and shipped.exists() and not Path(path).exists() else path
