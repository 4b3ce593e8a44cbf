"""Finds models of the Hugging Face hub in the local cache, without loading `huggingface_hub`."""

from __future__ import annotations

import os
import re
from pathlib import Path


def cached_folder(name: str) -> Path | None:
    """Folder of the cached snapshot of the hub model `name` ("Qwen/Qwen3-8B") that has a config.json; None if there is none.

    The revision is that of `main`, or else the newest snapshot.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or Path(name).exists():
        return None
    folder = _cache() / f"models--{name.replace('/', '--')}"
    snapshots = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    main = folder / "refs" / "main"
    if main.is_file():
        wanted = folder / "snapshots" / main.read_text().strip() / "config.json"
        snapshots = [wanted, *snapshots] if wanted.is_file() else snapshots
    return snapshots[0].parent if snapshots else None


def _cache() -> Path:
    """Folder of the hub's cache, by the variables that `huggingface_hub` reads."""
    if found := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(found).expanduser()
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"
