"""Hook of mkdocs: pages that lie beside the recipes, and links from the docs to files outside them.

`extra.outside` in `mkdocs.yml` names pages of the site with the files that they are made of: Markdown, or a notebook with its
outputs. Links between pages lead to pages; links to other files lead to the repository, whose address is `extra.source_url`, or
become plain text if it has none. The pages of errors are written here, and links to `errors/index.md#NAME`, which the repository
has, lead to the page of the message of this name or to that of this subject.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

sys.path.append(str(Path(__file__).parent))
# scripts import their neighbours
from error_pages import SUBJECTS, anchors, error_page

_ERRORS = "docs/errors/index.md"
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of files outside the docs, the pictures of notebooks, and the pages of errors."""
    root = Path(config["config_file_path"]).parent
    for page, source in config["extra"]["outside"].items():
        text = (root / source).read_text(encoding="utf-8")
        if source.endswith(".ipynb"):
            text, pictures = notebook_page(json.loads(text), PurePosixPath(page).stem)
            for name, content in pictures.items():
                files.append(File.generated(config, f"recipes/{name}", content=content))
        files.append(File.generated(config, page, content=text))
    for subject in SUBJECTS:
        files.append(File.generated(config, f"errors/{subject}.md", content=error_page(subject)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of one page."""
    outside = config["extra"]["outside"]
    if f"docs/{page.file.src_uri}" == _ERRORS:
        markdown = re.sub(
            r"^## (.+)$", lambda name: f"## [{name[1]}]({name[1].lower().replace(' ', '-')}.md)", markdown, flags=re.M
        )
    return with_links(markdown, page.file.src_uri, outside, config["extra"].get("source_url", ""))


def with_links(markdown: str, page: str, outside: dict[str, str], source_url: str) -> str:
    """The text of a page with links that are right on the site."""
    home = PurePosixPath(outside.get(page, f"docs/{page}")).parent
    pages = {source: name for name, source in outside.items()}

    def rewritten(link: re.Match[str]) -> str:
        label, target, anchor = link.groups()
        path = os.path.normpath(home / target)
        if path == _ERRORS and anchor:
            name = anchor.removeprefix("#")
            path, anchor = (f"docs/errors/{name}.md", "") if name in SUBJECTS else (f"docs/errors/{anchors()[name]}.md", anchor)
        inside = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
        if inside:
            return f"[{label}]({os.path.relpath(inside, PurePosixPath(page).parent)}{anchor or ''})"
        return f"[{label}]({source_url}/{path})" if source_url else label

    return _LINK.sub(rewritten, markdown)


def notebook_page(notebook: dict[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{stem}_{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![What the cell above draws]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", []))).rstrip():
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n", pictures
