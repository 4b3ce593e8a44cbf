"""Hook of mkdocs: links from the docs to files outside them lead to the repository, or become plain text if it has no address.

mkdocs calls `on_page_markdown` for every page. `extra.source_url` in `mkdocs.yml` is the address of the repository's files.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of one page."""
    source_url = config["extra"].get("source_url", "")

    def rewritten(link: re.Match[str]) -> str:
        label, target = link.groups()
        path = os.path.normpath(PurePosixPath("docs", page.file.src_uri).parent / target)
        if path.startswith("docs/"):
            return link[0]
        return f"[{label}]({source_url}/{path})" if source_url else label

    return _LINK.sub(rewritten, markdown)
