"""The pages of error messages: real errors stand there with their remedies, and every message of the source has a place."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datasets import Dataset
from helpers.models.tiny_models import tiny_llama
from transformers import TrainingArguments

from hf_longctx import LongContextConfig, NeedleTask, extend_positions, load_pipeline_stage, pack_sequences
from hf_longctx.cli.main import main as hf_longctx
from hf_longctx.hf.checkpoints.weights import checkpoint_files
from hf_longctx.hf.data.chat import read_messages
from hf_longctx.hf.data.scan import scan_dataset, too_long
from hf_longctx.hf.models.adapters import kind_problems
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.rules.classes import class_problem
from hf_longctx.hf.rules.models import model_problems
from hf_longctx.hf.rules.rule import Facts, refusals
from hf_longctx.hf.rules.training_arguments import VALUES

ROOT = Path(__file__).parents[2]
# scripts import their neighbours
sys.path.append(str(ROOT / "docs" / "scripts"))

import error_pages  # noqa: E402
from error_messages import HOLE, Message, Search, parts  # noqa: E402


def raised(function: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:
        function()
    return str(error.value)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert hf_longctx(list(arguments)) == 1
    return capsys.readouterr().err.strip()


def real_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, str]]:
    """(subject, message) of errors that bad input gives."""
    rows = Dataset.from_dict({"input_ids": [[1, 2], []]})
    plan = ("plan", "--gpus", "8", "--hardware")
    yield "settings", raised(lambda: LongContextConfig(max_length=-5))
    yield "settings", raised(lambda: LongContextConfig(activations="keep", host_gib=4.0))
    yield "settings", refusals(VALUES, Facts(args=TrainingArguments(str(folder), use_cpu=True, auto_find_batch_size=True)))[0]
    yield "settings", raised(lambda: load_pipeline_stage(str(folder / "nowhere"), LongContextConfig(stages=2)))
    yield "data", scan_dataset(rows, "train_dataset", 10).problems[0]
    yield "data", scan_dataset(rows.rename_column("input_ids", "text"), "train_dataset", 10).problems[0]
    yield "data", scan_dataset(rows.select([]), "train_dataset", 10).problems[0]
    yield "data", scan_dataset(rows.select([0]).add_column("pixel_values", [[1]]), "train_dataset", 10).problems[0]
    yield "data", too_long(scan_dataset(rows.select([0]), "train_dataset", 10).lengths, 1, 4, 4, "train_dataset")[0]
    yield "data", raised(lambda: read_messages("hello", "train_dataset row 3"))
    yield "models", class_problem(tiny_llama().model)
    yield "models", model_problems(ModelFacts.of(tiny_llama().half()))[0]
    yield "models", raised(lambda: extend_positions(tiny_llama().config, 1 << 20, rope_scaling="stretch"))  # type: ignore[arg-type]
    yield "trainers", raised(lambda: NeedleTask(make=print, lengths=(64,), depths=(2.0,)))
    yield "checkpoints", raised(lambda: checkpoint_files(folder))
    yield "command-line", raised(lambda: pack_sequences([3], 2))
    yield "command-line", printed(capsys, *plan, "abacus", "--model", "gpt-7b")
    yield "command-line", printed(capsys, *plan, "h100", "--model", "gpt-8b")
    yield "command-line", printed(capsys, "report", str(folder))
    assert kind_problems(tiny_llama()) == []


def entries_of(page: str) -> list[tuple[str, str]]:
    """(message, remedy) of every entry."""
    entries = re.findall(r"^#### (`.+`) \{#.+\}\n\n(?:A warning. )?(?:\*\*What to do:\*\* (.*) )?\(\[", page, re.MULTILINE)
    return [(code.strip("` "), re.sub(r"\\(.)", r"\1", remedy).replace("&lt;", "<")) for code, remedy in entries]


def pattern(text: str) -> str:
    return re.escape(text).replace(re.escape(HOLE), ".+?")


def test_real_errors_are_found_on_their_pages_with_their_remedies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = {subject: entries_of(error_pages.error_page(subject)) for subject in error_pages.SUBJECTS}
    num_errors = 0
    for subject, message in real_errors(tmp_path, capsys):
        fitting = {
            found: remedy
            for found, remedy in pages[subject]
            if re.search(f"{pattern(found)}(; ?|\n|$){pattern(remedy)}", message, re.DOTALL)
        }
        # most of its words
        best = max(fitting, key=lambda found: len(found), default="")
        assert len(best) + len(fitting.get(best, "")) > 30, (message, fitting)
        num_errors += 1
    assert num_errors > 15


def test_a_message_of_a_module_without_a_heading_is_refused() -> None:
    message = Message("it is wrong; leave it out", "hf_longctx/astrology/stars.py", "read", False)
    with pytest.raises(ValueError, match=r"messages of hf_longctx/astrology/stars\.py have no heading in .*error_pages\.py"):
        error_pages.place_of(message, {"hf/data": ("data", "Rows")})


def test_every_text_that_an_error_is_raised_with_is_on_a_page_unless_its_module_is_left_out() -> None:
    pages = "".join(error_pages.error_page(subject) for subject in error_pages.SUBJECTS)
    pages = pages.replace("\\", "").replace("&lt;", "<")
    left_out = [name for name, place in error_pages._places().items() if place is None]
    missing, num_found = [], 0
    for file in (ROOT / "hf_longctx" / "hf").rglob("*.py"):
        module = str(file.relative_to(ROOT / "hf_longctx").with_suffix(""))
        if any(module == name or module.startswith(f"{name}/") or name.startswith(f"{module}:") for name in left_out):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                pieces = [each.value for each in ast.walk(node.exc.args[0]) if isinstance(each, ast.Constant)]
                longest = max((each for each in pieces if isinstance(each, str)), key=len, default="").partition(";")[0].strip()
                num_found += longest in pages
                missing += [f"{file.name}:{node.lineno} {longest}"] if len(longest) > 30 and longest not in pages else []
    assert missing == [] and num_found > 200


def test_texts_are_followed_from_where_they_are_raised_to_where_they_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "a.py").write_text(
        """
from package.b import REMEDY, why
TABLE = {"speed": (1, "drive slower"), "height": (2, "climb down again")}

def check(value, name):
    problems = [f"{key} is {value}, not {right}; {remedy}" for key, (right, remedy) in TABLE.items()]
    if value:
        problems.append(f"{name} has the value {value!r} here; {REMEDY}")
    if reason := why(name):
        raise ValueError(reason)
    assert value, "this is only for ourselves to read"
    logger.warning("%s is used %d times in all; look", name, value)
    print("this is no refusal at all")
    return problems
"""
    )
    (folder / "b.py").write_text(
        '''
REMEDY = "give another one"

def why(name):
    """This is no message either, of course."""
    return f"the name {name} is not known here" if name else ""
'''
    )
    found = {message.text: message for message in Search(tmp_path, "package").messages()}
    assert sorted(found) == [
        "height is …, not …; climb down again",
        "speed is …, not …; drive slower",
        "the name … is not known here",
        "… has the value … here; give another one",
        "… is used … times in all; look",
    ]
    assert [text for text, message in found.items() if message.is_warning] == ["… is used … times in all; look"]
    assert found["the name … is not known here"].file == "package/b.py"


@pytest.mark.parametrize(
    "text, found, remedy",
    [
        ("a is 1; leave it out", "a is 1", "leave it out"),
        ("a (one; two) is 1; set b; or c", "a (one; two) is 1; set b", "or c"),
        ("a is 1; leave it out; b does the same", "a is 1", "leave it out; b does the same"),
        ("a is broken:\n- one\n- two\nStart anew", "a is broken: - one - two", "Start anew"),
        ("a is 1, expected a list", "a is 1, expected a list", ""),
    ],
)
def test_a_message_is_divided_into_what_was_found_and_what_to_do(text: str, found: str, remedy: str) -> None:
    assert parts(text) == (found, remedy)
