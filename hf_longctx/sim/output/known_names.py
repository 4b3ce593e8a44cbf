"""Tables of the models and the hardware that forecasts know by name."""

from __future__ import annotations

from hf_longctx.plan.cost.catalog import model_names, named_model
from hf_longctx.plan.cost.profiles import profile_names, read_profile
from hf_longctx.sim.output.tables import Table
from hf_longctx.sim.prices import PRICES

_GIB = 2**30


def model_table() -> Table:
    """Names of the catalogue, with the billions of parameters and the positions of each."""
    specs = {name: named_model(name) for name in model_names()}
    rows = [
        (name, f"{spec.num_parameters / 1e9:.1f}", str(spec.num_layers), f"{spec.max_positions:,}", "")
        for name, spec in specs.items()
    ]
    return Table.of(("model", "billion parameters", "layers", "positions", ""), rows)


def hardware_table() -> Table:
    """Shipped profiles, with the memory of a device and its share of the host's, the price of an hour, and measured models."""
    rows = []
    for name in profile_names():
        profile = read_profile(name)
        spec = profile.spec
        price = f"{PRICES[name].usd_per_hour:.2f}" if name in PRICES else "-"
        host = f"{spec.host_bytes / _GIB:.0f}" if spec.host_bytes else "-"
        measured = ", ".join(model.model for model in profile.models)
        rows.append(
            (name, f"{spec.device_bytes / _GIB:.0f}", host, price, f"{spec.name}{'; measured: ' if measured else ''}{measured}")
        )
    return Table.of(("hardware", "GiB", "host GiB", "USD an hour", ""), rows)
