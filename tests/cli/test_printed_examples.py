"""Examples of what `hf-longctx plan` prints, in README and guides, are what it prints now."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hf_longctx.cli.main import main

ROOT = Path(__file__).parents[2]
# a command, and what it prints
EXAMPLE = re.compile(r"```bash\nhf-longctx (plan [^\n]*)\n```\n\n```text\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
EXAMPLES = [
    pytest.param(command, printed, id=f"{path.name}-{place}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for place, (command, printed) in enumerate(EXAMPLE.findall(path.read_text()))
]


def parts(line: str) -> tuple[str, list[float]]:
    """The words of a line, and its numbers, without layouts, of which several may be equally fast."""
    line = re.sub(r"  <.*| [<>]\d.*x\d.*$", "", line)
    return " ".join(NUMBER.sub("#", line).split()), [float(each.replace(",", "")) for each in NUMBER.findall(line)]


@pytest.mark.parametrize(("command", "printed"), EXAMPLES)
def test_what_pages_show_is_printed(command: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(shlex.split(command))
    found = [parts(line) for line in capsys.readouterr().out.splitlines()]
    # the time to plan depends on the machine
    shown = [parts(line) for line in printed.splitlines() if line.strip(" .") and "planned in" not in line]
    for words, numbers in shown:
        same = [other for text, other in found if text == words]
        # rounded numbers, and plans that are equally fast on processors that sum in another order
        assert any(numbers == pytest.approx(other, rel=0.01, abs=0.5) for other in same), (words, numbers, same)


def test_pages_have_examples() -> None:
    assert len(EXAMPLES) >= 2
