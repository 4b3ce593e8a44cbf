"""Versions of transformers and TRL at the edges of what is supported."""

from __future__ import annotations

import pytest

from hf_longctx.hf.rules.rule import Facts, refusals
from hf_longctx.hf.rules.trl import _TRL_VERSION, VERSIONS


def test_the_installed_transformers_is_supported() -> None:
    assert refusals(VERSIONS, Facts()) == []


# versions are not compared as texts: 5.9 is older than 5.17, 5.100 is newer, and a release candidate comes before its release
@pytest.mark.parametrize("installed", ["5.17", "5.17.0", "5.100.1", "6.0"])
def test_new_enough_versions_of_transformers_are_accepted(installed: str) -> None:
    assert refusals(VERSIONS, Facts(versions={"transformers": installed})) == []


@pytest.mark.parametrize("installed", ["5.16.9", "5.9", "4.57.1", "5.17.0rc1"])
def test_an_older_transformers_is_refused_with_both_versions(installed: str) -> None:
    message = f"transformers {installed} is installed, 5.17 or newer is needed; pip install -U transformers"
    assert refusals(VERSIONS, Facts(versions={"transformers": installed})) == [message]


@pytest.mark.parametrize("installed", ["1.16.0", "1.16.7"])
def test_fixes_of_the_tested_trl_are_accepted(installed: str) -> None:
    assert refusals(_TRL_VERSION, Facts(versions={"trl": installed})) == []


@pytest.mark.parametrize("installed", ["1.15.2", "1.17.0", "2.16.0", "1.1.6"])
def test_another_trl_is_refused_with_both_versions(installed: str) -> None:
    message = f"trl {installed} is installed, but its trainers are tested with 1.16; pip install 'trl==1.16.*'"
    assert refusals(_TRL_VERSION, Facts(versions={"trl": installed})) == [message]


def test_a_trainer_with_a_loss_of_its_own_names_its_trl() -> None:
    given = {"tested_trl": "1.9"}
    assert refusals(_TRL_VERSION, Facts(given=given, versions={"trl": "1.9.2"})) == []
    assert "tested with 1.9; " in refusals(_TRL_VERSION, Facts(given=given, versions={"trl": "1.16.0"}))[0]
