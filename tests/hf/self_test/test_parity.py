"""From errors to findings: the cause first, by layer and pattern, and nothing that is not a number passes."""

from __future__ import annotations

import pytest

from hf_longctx.hf.self_test.parity import EMBEDDING, ENDS, Errors, Limits, findings, merged

WINDOWS = {0: 6, 1: 0}


def said(errors: Errors, limits: Limits | None = None) -> list[tuple[str, str]]:
    sites: Errors = {(kind, site): 1e-9 for kind in ("values", "gradients", "weights") for site in (EMBEDDING, 0, 1)}
    sites |= {("early", 0): 0.0, ("loss", 0): 0.0, ("documents", 0): 0.0, ("window", 0): 0.0, ("token 0", 0): 1e-9}
    found = findings(sites | errors, limits or Limits(1e-5), lambda site: f"site {site}", WINDOWS)
    return [(each.check, each.text) for each in found]


def test_the_cause_comes_first_and_what_follows_from_it_is_left_out() -> None:
    assert said({}) == []
    (hidden, loss) = said({("values", 0): 0.1, ("early", 0): 0.1, ("values", 1): 0.5, ("gradients", 1): 1.0, ("loss", 0): 0.2})
    assert hidden == ("hidden states", "site 0 is the first that differs, by 1.0e-01 (limit 1e-05)")
    assert loss == ("loss", "differs by 2.0e-01 (limit 1e-05)")
    assert said({("values", 0): 0.1}) == [
        ("window", "site 0 differs by 1.0e-01 (limit 1e-05), but only from token 6 of a document on")
    ]


def test_gradients_are_followed_from_the_loss_back() -> None:
    ((check, text),) = said({("gradients", EMBEDDING): 0.3, ("gradients", 0): 0.2})
    assert check == "gradients"
    assert text.startswith("site 1 gets the right gradient of its output, but its input's gradient differs by 2.0e-01")
    ((_, text),) = said({("gradients", 1): 0.3, ("gradients", 0): 0.2})
    assert text == "the gradient that head and loss return to site 1 differs by 3.0e-01 (limit 1e-05)"
    ((check, text),) = said({("weights", 0): 0.1, ("weights", 1): 0.2})
    assert (check, text.split(" (and")[0]) == ("gradient per layer", "of site 0 differs by 1.0e-01 (limit 1e-05) of its norm")
    assert "site 1 by 2.0e-01" in text


@pytest.mark.parametrize("check", ["documents", "window"])
def test_what_is_masked_is_exactly_zero(check: str) -> None:
    assert [name for name, _ in said({(check, 0): 1e-30})] == [check]


def test_a_yardstick_widens_its_own_measure_only() -> None:
    limits = Limits(1e-5, 4.0, {("values", 0): 0.1})
    assert said({("values", 0): 0.39, ("early", 0): 0.0}, limits) == []
    assert said({("values", 0): 0.41}, limits) and said({("values", 1): 0.1}, limits)


def test_the_worst_rank_counts_and_not_a_number_is_the_worst() -> None:
    both = merged([{("loss", 0): 0.1}, {("loss", 0): 0.3, ("weights", ENDS): float("nan")}])
    assert both == {("loss", 0): 0.3, ("weights", ENDS): float("inf")}
    assert [name for name, _ in said(both)] == ["loss", "gradient per layer"]
