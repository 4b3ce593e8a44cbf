"""Writes the pages that repeat what the code says: `python docs/scripts/generated_pages.py`.

`reference/settings.md` comes from the fields of `LongContextConfig`, `reference/data-fields.md` from the tables of
`hf/data/fields.py`, the table in `reference/training-arguments.md` from that of the start checks, `llms.txt` from the site's
navigation and the first sentence of every page. A test compares them with those in the repository. The pages of errors are
written when the site is built (`error_pages.py`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from error_pages import SUBJECTS, error_page

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.fields import CHAT_COLUMNS, MESSAGE_FIELDS, TOKEN_COLUMNS, Column, MessageField
from hf_longctx.hf.rules.deepspeed import FIELDS
from hf_longctx.hf.rules.training_arguments import SETTINGS, Setting

DOCS = Path(__file__).parents[1]
CONFIG = DOCS.parent / "mkdocs.yml"
ARGUMENTS = DOCS / "reference" / "training-arguments.md"
# heading of the part of the page that is written here, to its end
_TABLE = "## Every field"
_MARKS = {"supported": "🟢", "Trainer's own": "🟢", "some values": "🟡", "translated": "🟢", "no effect": "⚪"}


def settings_page() -> str:
    """The table of all settings: name, default, and the help text of `--help`."""
    rows = []
    for field in dataclasses.fields(LongContextConfig):
        text, _, default = field.metadata["help"].partition(" Default: ")
        shown = default.removesuffix(".") if default else f"`{_as_typed(field.default)}`"
        rows.append(f"| `{field.name}` | {_linked(shown)} | {_linked(text)} |")
    return "\n".join(
        [
            "# Settings of `LongContextConfig`",
            "",
            "Pass them in a script as `LongContextConfig(max_length=32768)`, or to recipes as `--max_length 32768` or in YAML.",
            "`python docs/scripts/generated_pages.py` writes this page.",
            "",
            "| field | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def arguments_page() -> str:
    """The page about `TrainingArguments`: what people wrote, then the table of every field."""
    written = ARGUMENTS.read_text().partition(f"{_TABLE}\n")[0]
    rows = [f"| {_MARKS[setting.state]} | `{name}` | {_state(setting)} |" for name, setting in SETTINGS.items()]
    return "\n".join(
        [
            f"{written}{_TABLE}",
            "",
            "🟢 works as in `Trainer` · 🟡 some values, others are refused by name · ⚪ no effect, which one warning says.",
            "`python docs/scripts/generated_pages.py` writes this table from the one that the checks at the start read.",
            "",
            "| | field | here |",
            "|---|---|---|",
            *rows,
            "",
            *_deepspeed_lines(),
            "",
        ]
    )


def _deepspeed_lines() -> list[str]:
    """The section with every field of DeepSpeed's configuration; fields with the same words share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, row in FIELDS.items():
        rows.setdefault((row.state, row.note), []).append(f"`{name}.{row.switch}`" if row.switch else f"`{name}`")
    kinds = {"translated": "🟢 | {} | {}", "refused": "🔴 | {} | refused: {}", "no effect": "⚪ | {} | no effect: {}"}
    return [
        "## DeepSpeed's configuration",
        "",
        "🟢 translated · 🔴 refused by name, unless it is off · ⚪ no effect, which the line says. The value `auto` leaves a",
        "field to the arguments; unknown names are refused with the nearest known one. `python docs/scripts/generated_pages.py`",
        "writes this table from `FIELDS` of `hf/rules/deepspeed.py`.",
        "",
        "| | field | here |",
        "|---|---|---|",
        *(f"| {kinds[state].format(', '.join(names), note)} |" for (state, note), names in rows.items()),
    ]


def _state(setting: Setting) -> str:
    """The state of a field of `TrainingArguments` in words."""
    if setting.values:
        shown = [f"`{value!r}`" for value in setting.values if value not in ("", [])] or ["nothing"]
        return f"only {' or '.join(shown)}; for others: {setting.note}"
    where = {"evaluation": " in evaluation", "batches": " in training"}.get(setting.scope, "")
    if setting.state == "no effect":
        return f"no effect{where}: {setting.note}"
    kind = "translated into " if setting.state == "translated" else ""
    return kind + (setting.note or ("as in `Trainer`" if setting.state == "supported" else "`Trainer` alone reads it"))


def _as_typed(value: Any) -> str:
    """A default as users type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def _linked(text: str) -> str:
    """The text with links in place of the paths of other pages."""
    return re.sub(r"\(docs/([\w/-]+)\.md\)", lambda path: f"([more](../{path[1]}.md))", text)


def llms_page() -> str:
    """The site as `llms.txt`: the name, what it is for, and every page with its first sentence."""
    config = site_config()
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section, pages in sections(config["nav"]):
        lines += ["", f"## {section}", ""]
        lines += [f"- [{title_of(text)}]({page}): {first_sentence(text)}" for page in pages for text in [text_of(page)]]
    return "\n".join(lines) + "\n"


def site_config() -> dict[str, Any]:
    """The settings of `mkdocs.yml`, without the tags that only mkdocs knows."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    settings: dict[str, Any] = yaml.load(CONFIG.read_text(), Loader)
    return settings


def sections(nav: list[Any]) -> Iterator[tuple[str, list[str]]]:
    """Every section of the navigation with its pages."""
    for entry in nav:
        ((name, inside),) = entry.items()
        yield name, [inside] if isinstance(inside, str) else [next(iter(page.values())) for page in inside]


def text_of(page: str) -> str:
    """The Markdown of a page, which may lie outside the docs; of a notebook, the first cell."""
    if (subject := page.removeprefix("errors/").removesuffix(".md")) in SUBJECTS:
        return error_page(subject)
    source = site_config()["extra"]["outside"].get(page)
    text = (DOCS / page if source is None else CONFIG.parent / source).read_text()
    return "".join(json.loads(text)["cells"][0]["source"]) if source and source.endswith(".ipynb") else text


def title_of(text: str) -> str:
    """The heading of a page, without backquotes."""
    return text.splitlines()[0].removeprefix("# ").replace("`", "")


def first_sentence(text: str) -> str:
    """The first sentence of a page's first paragraph, without links and marks."""
    without_code = re.sub(r"^```.*?^```\n", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = (part.strip() for part in without_code.split("\n\n")[1:])
    prose = next(part for part in paragraphs if part and part[0] not in "#|!-")
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", prose).replace("\n", " ").replace("**", "")
    return re.split(r"(?<=[.:])\s", plain)[0].removesuffix(":").removesuffix(".") + "."


def fields_page() -> str:
    """The page about the fields of messages and the columns of rows, with the tables that the code reads."""
    messages = {
        name: dataclasses.replace(
            field,
            meaning=f"a flag of {field.meaning}{'; *all speakers*' if field.learns_others else ''}"
            if field.use == "flag"
            else field.meaning,
        )
        for name, field in MESSAGE_FIELDS.items()
    }
    return _FIELDS_PAGE.format(*(_grouped(fields) for fields in (messages, CHAT_COLUMNS, TOKEN_COLUMNS)))


def _grouped(fields: Mapping[str, MessageField | Column]) -> str:
    """The rows of a table: the names with one use and meaning, which, and what."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, field in fields.items():
        names.setdefault((field.use, field.meaning), []).append(f"`{name}`")
    return "\n".join(f"| {', '.join(own)} | {use} | {meaning} |" for (use, meaning), own in names.items())


_FIELDS_PAGE = """# What a row of data says

Every field of a message and every column of a row is read, named as not read, or refused by name with row and value. These tables
are those by which the code decides; `python docs/scripts/generated_pages.py` writes this page.

## Fields of a message

A `text` is rendered if the chat template reads it. A `flag` says whether a turn of the assistant is learnt: 0 and false for no, 1
and true for yes, null for a turn without the flag, which is learnt. Other values, flags that disagree, and flags that would teach
another speaker (those marked *all speakers*) are refused. A `note` is ignored. A field that is not here is text if the template
names it, and refused otherwise. Trainers of TRL that tokenise conversations themselves do as TRL does: they ignore flags.

| field | use | meaning |
|---|---|---|
{}

Keys of a message that are null are left out, as `apply_chat_template` does. Nulls inside tool calls, tools and other values are
rendered if the file holds them: in files of JSON that `datasets` reads, in JSON text, and for keys that are null in every row. In
other data, Arrow adds to each row the keys that other rows have; such nulls are left out, and a line in the log names them.

## Columns of conversations

`tokenise_chat` reads the column with the messages and those below. It refuses other columns if the chat template reads a
variable of that name, if their name says that they mask or weigh (mask, weight, loss, train, label, kwargs) and they hold no
text, and if they have one number per message. It refuses rows with images, video or sound that it does not read, in columns of
any name if they hold files of `datasets`, else in those named so (`img`, `video_path`, `pixel_values`), but not by an address of
the web (`image_url`); so do `tokenise_text` and `tokenise_completions`. It names the rest once: *columns not read: id, source*.

| column | use | meaning or remedy |
|---|---|---|
{}

## Columns of rows of tokens

Other columns are refused if their name says that they mask or weigh and they hold no text, if they have one number per token, and
if they are inputs for images, sound or video. The rest is named once as not read.

| column | use | meaning or remedy |
|---|---|---|
{}
"""


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "reference" / "settings.md": settings_page,
    DOCS / "reference" / "data-fields.md": fields_page,
    ARGUMENTS: arguments_page,
    DOCS / "llms.txt": llms_page,
}


def main() -> None:
    for file, page in PAGES.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(page())
        print(file)


if __name__ == "__main__":
    main()
