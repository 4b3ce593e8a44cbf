"""The docs site: every page is in its navigation, generated pages are up to date, and it builds without a warning."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def loaded(name: str) -> ModuleType:
    """A script of `docs/scripts`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# scripts import their neighbours
sys.path.append(str(DOCS / "scripts"))
PAGES = loaded("generated_pages")


@pytest.mark.parametrize("file", PAGES.PAGES, ids=lambda file: file.name)
def test_generated_pages_are_up_to_date(file: Path) -> None:
    assert file.read_text() == PAGES.PAGES[file](), f"run python docs/scripts/generated_pages.py, which writes {file.name}"


def test_scripts_find_what_they_import_of_the_package() -> None:
    missing = []
    for file in (DOCS / "scripts").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_longctx"):
                module = importlib.import_module(node.module or "")
                missing += [f"{file.name}: {node.module}.{name.name}" for name in node.names if not hasattr(module, name.name)]
    assert not missing


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [page for _, pages in PAGES.sections(PAGES.site_config()["nav"]) for page in pages]
    outside = PAGES.site_config()["extra"]["outside"]
    written = [f"errors/{subject}.md" for subject in PAGES.SUBJECTS]
    assert sorted(listed) == sorted([*(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")), *written, *outside])
    # each page of a recipe is there
    assert sorted(outside.values()) == sorted(
        str(file.relative_to(ROOT)) for kind in ("md", "ipynb") for file in (ROOT / "recipes").rglob(f"*.{kind}")
    )


def test_notebooks_are_kept_with_what_their_cells_draw() -> None:
    for path in (ROOT / "recipes").rglob("*.ipynb"):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        shown = ["".join(cell["source"]) for cell in cells if any("image/png" in o.get("data", {}) for o in cell["outputs"])]
        assert shown == [source for cell in cells for source in ["".join(cell["source"])] if source.startswith("Image(")] != []


def test_every_message_that_the_docs_explain_is_one_of_the_code() -> None:
    code = "\n".join(file.read_text() for folder in ("hf_longctx", "recipes") for file in (ROOT / folder).rglob("*.py"))
    # a text goes on in the next line's string
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    page = (DOCS / "guides" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 30
    pieces = [(message, piece.strip()) for message in messages for piece in message.split("...")]
    assert [each for each in pieces if each[1] not in code] == []


def test_first_sentences_and_defaults_are_read_from_where_they_stand() -> None:
    assert (
        PAGES.first_sentence("# A\n\n## B\n\n```\nx\n\ny\n```\n\n![x](y)\n\n**One** [two](three.md): four. Five.\n") == "One two."
    )
    assert [PAGES._as_typed(value) for value in (True, 0, 60.0, "", "auto")] == ["true", "0", "60", '""', "auto"]


# CI has a step for it
@pytest.mark.wide
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason='needs mkdocs-material (pip install -e ".[docs]")')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "img" / "step.png").exists() and not (tmp_path / "scripts").exists()
    # links of the repository to all messages lead to one of them
    page = (tmp_path / "reference" / "trl-tests" / "index.html").read_text()
    (place, name), *_ = re.findall(r'href="../../errors/([a-z-]+)/#([^"]+)"', page)
    assert f'id="{name}"' in (tmp_path / "errors" / place / "index.html").read_text()
    notebook = (tmp_path / "recipes" / "notebook" / "index.html").read_text()
    pictures = re.findall(r'src="\.\./(notebook_\d\.png)"', notebook)
    assert len(pictures) == 2 and all((tmp_path / "recipes" / name).stat().st_size > 1000 for name in pictures)
