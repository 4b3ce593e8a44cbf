"""Reads the settings of a recipe: one YAML file, then `--key value` pairs that override it.

`HfArgumentParser` checks them, but it reads either a file or a command line. So the file's entries are put in front of the
command line: argparse then checks names, types and choices of both, and what comes later wins.
"""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

# settings whose value may be a path that starts with recipes/, which outside the repository is looked up in the package
_PATHS = ("model_name_or_path", "tokenizer", "chat_template")


def read_settings(dataclasses: tuple[type, ...], arguments: list[str] | None = None) -> tuple[Any, ...]:
    """Reads one instance of each dataclass from the words `[CONFIG.yaml] [--key value ...]` (default: the command line).

    Exits with argparse's message for an unknown key, a wrong type or a wrong choice.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0].endswith((".yaml", ".yml")):
        words = [*_words_of_file(Path(words[0])), *words[1:]]
    elif late := [word for word in words if word.endswith((".yaml", ".yml"))]:
        raise SystemExit(f"{late[0]} comes after other settings; give the YAML file first")
    parser = _Parser(dataclasses, allow_abbrev=False)
    try:
        *settings, unknown = parser.parse_args_into_dataclasses(
            args=words, look_for_args_file=False, return_remaining_strings=True
        )
    except ValueError as error:
        # a dataclass refused its values with a message for the user, who does not need the traceback
        raise SystemExit(f"settings: {error}") from error
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0], known, n=3)
        raise SystemExit(f"unknown setting {unknown[0]!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    return tuple(settings)


class _Parser(HfArgumentParser):
    """Prints errors in one line, because the usage text of some two hundred settings would bury them."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(f"settings: {message} (--help lists all settings)")


class _UniqueKeys(yaml.SafeLoader):
    """Loads YAML and refuses a key that occurs twice; PyYAML's loader would silently take the later one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _words_of_file(path: Path) -> list[str]:
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; give a YAML file with one setting per line, for example max_length: 4096")
    try:
        settings = yaml.load(path.read_text(), Loader=_UniqueKeys) or {}
    except yaml.YAMLError as error:
        raise SystemExit(f"{path}: {error}") from None
    if not isinstance(settings, dict):
        raise SystemExit(f"{path}: expected one `key: value` per line, found a {type(settings).__name__}")
    words: list[str] = []
    for key, value in settings.items():
        # a setting without a value keeps its default
        if value is not None:
            values = [_shipped(word) if key in _PATHS else word for word in _words_of_value(value)]
            # argparse would take a value like --- for a setting
            words += [f"--{key}={values[0]}"] if len(values) == 1 and values[0].startswith("-") else [f"--{key}", *values]
    return words


def _words_of_value(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [json.dumps(value)]
    if isinstance(value, list):
        return [word for item in value for word in _words_of_value(item)]
    return [str(value)]


def _shipped(path: str) -> str:
    """Resolves `recipes/...` inside the package if it is not in the current folder; returns any other path as it is."""
    shipped = Path(__file__).parent / Path(path).relative_to("recipes") if path.startswith("recipes/") else None
    return str(shipped) if shipped is not None and shipped.exists() and not Path(path).exists() else path
