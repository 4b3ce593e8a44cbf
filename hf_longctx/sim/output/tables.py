"""Makes tables of reports, with aligned columns, and tables of the models and hardware that forecasts know by name."""

from __future__ import annotations

from collections.abc import Sequence

from hf_longctx.plan.cost.catalog import model_names, named_model, named_type
from hf_longctx.plan.cost.profiles import profile_names, read_profile
from hf_longctx.plan.cost.public_configs import ALIASES
from hf_longctx.sim.execution import PRICES


class Table(str):
    """Rows below their header as text, indented by two; the first and last column are left-aligned, the others right-aligned."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        """Makes a table of these cells; every row has as many as the header."""
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = []
        for row in (head, *rows):
            cells = [
                cell.ljust(width) if column in (0, len(head) - 1) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append(("  " + "  ".join(cells)).rstrip())
        table = cls("\n".join(line for line in lines if line))
        table.head, table.rows = tuple(head), tuple(tuple(row) for row in rows)
        return table


def as_text(sections: Sequence[Sequence[str]]) -> str:
    """Formats sections of lines and tables as plain text, with an empty line between sections."""
    return "\n\n".join("\n".join(section) for section in sections if section)


_GIB = 2**30


def model_table() -> Table:
    """Lists the catalogue, with billions of parameters, layers, positions, and the type of model or the shape that it has."""
    rows = []
    for name in model_names():
        spec, same = named_model(name), ALIASES.get(name)
        kind = f"as {same[0]}" if same else named_type(name)
        rows.append((name, f"{spec.num_parameters / 1e9:.1f}", str(spec.num_layers), f"{spec.max_positions:,}", kind))
    return Table.of(("model", "billion parameters", "layers", "positions", ""), rows)


def hardware_table() -> Table:
    """Lists shipped profiles: memory of a device and its share of the host's, links, prices, number formats, measured models."""
    rows = []
    for name in profile_names():
        profile = read_profile(name)
        spec = profile.spec
        price = f"{PRICES[name].usd_per_hour:.2f}" if name in PRICES else "-"
        host = f"{spec.host_bytes / _GIB:.0f}" if spec.host_bytes else "-"
        measured = ", ".join(model.model for model in profile.models)
        measured = f"; measured: {measured}" if measured else ""
        link, formats = f"{spec.link_bytes_per_s / 1e9:.0f}", profile.formats or "-"
        rows.append((name, f"{spec.device_bytes / _GIB:.0f}", host, link, price, formats, f"{spec.name}{measured}"))
    return Table.of(("hardware", "GiB", "host GiB", "link GB/s", "USD an hour", "tensor cores", ""), rows)
