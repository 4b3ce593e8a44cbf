"""Every rule applies to its example, and to no plain run; what its message says is what the pages of errors say."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.trainers.rule_examples import facts_of

from hf_longctx.hf.rules.rule import Rule

# scripts of the docs import their neighbours
sys.path.append(str(Path(__file__).parents[3] / "docs" / "scripts"))

from error_messages import rules

RULES = {name: rule for name, rule, _, _ in rules()}


@pytest.fixture(autouse=True)
def kept_environment() -> Iterator[None]:
    """Takes back what examples change outside of their run; TrainingArguments also writes an FSDP setting there."""
    before, modules = dict(os.environ), {name: sys.modules.get(name, os) for name in ("torchao.optim", "liger_kernel")}
    yield
    os.environ.clear()
    os.environ.update(before)
    for name, module in modules.items():
        sys.modules[name] = module
        if module is os:
            del sys.modules[name]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_applies_to_its_example_and_to_no_plain_run(name: str, tmp_path: Path) -> None:
    check(RULES[name], tmp_path)


def check(rule: Rule, tmp_path: Path) -> None:
    (message, *_) = rule.messages(facts_of(rule.example, tmp_path))
    # names in braces are filled in, and all else is as it stands
    pieces = [re.escape(piece.format()) for piece in re.split(r"(?<!\{)\{\w[^{}]*\}(?!\})", f"{rule.text}; {rule.remedy}")]
    assert re.fullmatch(".*".join(pieces), message), message
    assert list(rule.messages(facts_of("", tmp_path))) == []


def test_the_rule_of_the_page_for_contributors_applies_to_its_example(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "add-a-refusal.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ((name, rule),) = eval(f"{{{block}}}", {"Rule": Rule}).items()
    check(rule, tmp_path)
    assert name not in RULES and page.count(name) > 1
