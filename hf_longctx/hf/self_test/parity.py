"""Turns the measured errors of a self-test on all ranks into named findings, the likely cause first.

`self_test.check` calls `findings`. If hidden states differ, the error arose at the first site where they do, since all later
sites differ as a consequence. If all hidden states agree, gradients are followed back from the loss: the first site whose
gradient differs is the input of the layer whose backward is wrong. If these agree too, only the sum of weight gradients over
chunks and ranks can be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# sites: the embedding, what layers get where features of images stand in it, a layer's number, all weights outside of layers
# and towers, and towers
EMBEDDING, MERGED, ENDS, TOWERS = -2, -1, 10**9, 10**9 + 1
_ZEROS = ("documents", "window")
Measure = tuple[str, int]
Errors = dict[Measure, float]


@dataclass(frozen=True, slots=True)
class Finding:
    """One failed check. check: its name. text: place and size of the error."""

    check: str
    text: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest errors allowed: `floor`, or `factor` times the measure's value in `yardstick` if that is larger."""

    floor: float
    factor: float = 0.0
    yardstick: Mapping[Measure, float] | None = None

    def of(self, measure: Measure) -> float:
        """Returns the limit of one measure; zero for gradients at tokens that must not be seen."""
        return 0.0 if measure[0] in _ZEROS else max(self.floor, self.factor * (self.yardstick or {}).get(measure, 0.0))

    def is_kept(self, errors: Errors, measure: Measure) -> bool:
        """Whether an error is within its limit or was not measured."""
        return measure not in errors or errors[measure] <= self.of(measure)


def merged(everyone: Sequence[Errors]) -> Errors:
    """Returns the largest error of every measure over all ranks."""
    result: Errors = {}
    for errors in everyone:
        for measure, error in errors.items():
            # NaN counts as the largest error
            result[measure] = max(result.get(measure, 0.0), error if error == error else float("inf"))
    return result


def findings(errors: Errors, limits: Limits, describe: Callable[[int], str], windows: Mapping[int, int]) -> list[Finding]:
    """Lists failed checks, the cause first; empty if every error is within its limit.

    These measures are relative to the norm of the plain run: "loss"; "values" and "gradients" of a site; "early", the values of a
    site's first tokens, which a window does not affect; "states" of a layer, at the ends of slices; and "weights" of a layer. For
    "token 0", "documents" and "window" see `self_test.check`. describe: returns the name of a site.
    """
    found = [*_hidden(errors, limits, describe, windows), *_states(errors, limits, describe)]
    has_cause = bool(found)
    if not limits.is_kept(errors, ("loss", 0)):
        why = "" if has_cause else " although all hidden states agree, so the labels or the division by their number are wrong"
        found.append(Finding("loss", f"differs by {_of(errors, limits, ('loss', 0))}{why}"))
    if not has_cause:
        found += _gradients(errors, limits, describe)
    found += _weights(errors, limits, describe)
    for check, text in (
        ("token 0", "the last token's gradient at token 0 of its document differs by"),
        ("documents", "the loss of one document has a gradient at tokens of another, up to"),
        ("window", "a token's loss has a gradient at tokens that no window lets it see, up to"),
    ):
        if not limits.is_kept(errors, (check, 0)):
            found.append(Finding(check, f"{text} {_of(errors, limits, (check, 0))}"))
    return found


def _hidden(errors: Errors, limits: Limits, describe: Callable[[int], str], windows: Mapping[int, int]) -> list[Finding]:
    sites = sorted(site for kind, site in errors if kind == "values")
    bad = next((site for site in sites if not limits.is_kept(errors, ("values", site))), None)
    if bad is None:
        return []
    size = _of(errors, limits, ("values", bad))
    if windows.get(bad) and limits.is_kept(errors, ("early", bad)):
        return [Finding("window", f"{describe(bad)} differs by {size}, but only from token {windows[bad]} of a document on")]
    return [Finding("hidden states", f"{describe(bad)} is the first that differs, by {size}")]


def _states(errors: Errors, limits: Limits, describe: Callable[[int], str]) -> list[Finding]:
    """Returns the finding for the first layer with a wrong state at the end of a slice."""
    sites = sorted(site for kind, site in errors if kind == "states")
    bad = next((site for site in sites if not limits.is_kept(errors, ("states", site))), None)
    if bad is None:
        return []
    size = _of(errors, limits, ("states", bad))
    return [Finding("states", f"{describe(bad)} is the first whose state at the end of a slice differs, by {size}")]


def _gradients(errors: Errors, limits: Limits, describe: Callable[[int], str]) -> list[Finding]:
    """Returns the finding for the last site with a wrong gradient: the layer after it turned a right one into a wrong one."""
    sites = sorted(site for kind, site in errors if kind == "gradients")
    bad = next((site for site in reversed(sites) if not limits.is_kept(errors, ("gradients", site))), None)
    if bad is None:
        return []
    size = _of(errors, limits, ("gradients", bad))
    behind = next((site for site in sites if site > bad), None)
    if behind is None:
        return [Finding("gradients", f"the gradient that head and loss return to {describe(bad)} differs by {size}")]
    return [
        Finding(
            "gradients",
            f"{describe(behind)} gets the right gradient of its output, but its input's gradient differs by {size}",
        )
    ]


def _weights(errors: Errors, limits: Limits, describe: Callable[[int], str]) -> list[Finding]:
    sites = sorted(site for kind, site in errors if kind == "weights")
    bad = [site for site in sites if not limits.is_kept(errors, ("weights", site))]
    if not bad:
        return []
    worst = max(bad, key=lambda site: errors["weights", site])
    others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return [
        Finding(
            "gradient per layer",
            f"of {describe(bad[0])} differs by {_of(errors, limits, ('weights', bad[0]))} of its norm{others}, the worst "
            f"{describe(worst)} by {errors['weights', worst]:.1e}",
        )
    ]


def _of(errors: Errors, limits: Limits, measure: Measure) -> str:
    return f"{errors[measure]:.1e} (limit {limits.of(measure):.0e})"
