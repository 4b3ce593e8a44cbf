"""Prices of GPU hours, which turn predicted seconds into money."""

from __future__ import annotations

from dataclasses import dataclass

from hf_longctx.plan.cost.profiles import normal_name


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for one GPU and hour, and where the number is from."""

    usd_per_hour: float
    source: str


# middle of the range in https://www.mercatus-ai.com/blog/cloud-gpu-pricing
_SURVEY = "specialised clouds, on demand, May 2026"

# shipped hardware profile -> price; others have none until the user gives one
PRICES = {"a100-80g": Price(1.30, _SURVEY), "h100": Price(3.00, _SURVEY), "h200": Price(4.00, _SURVEY)}


def price_of(hardware: str, usd_per_hour: float | None) -> Price | None:
    """The price that the user gave, or the listed one of a shipped profile; None if there is neither.

    Raises ValueError for a negative price.
    """
    if usd_per_hour is not None:
        if usd_per_hour < 0:
            raise ValueError(f"--price-per-gpu-hour is {usd_per_hour:g}; give 0 or more US dollars, or leave it out")
        return Price(usd_per_hour, "as given")
    return next((price for name, price in PRICES.items() if normal_name(name) == normal_name(hardware)), None)
