"""Tables of reports: lines of text with aligned columns, which a terminal may draw in its own way."""

from __future__ import annotations

from collections.abc import Sequence


class Table(str):
    """Rows below their header as text, indented by two; the first and last column are left-aligned, the others right-aligned."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        """The table of these cells; every row has as many as the header."""
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
    """Sections of lines and tables as plain text, with an empty line between sections."""
    return "\n\n".join("\n".join(section) for section in sections if section)
