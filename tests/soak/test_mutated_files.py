"""A few damaged files of every kind end in a result or in a refusal; `mutated_files.py` tries as many as you like."""

from __future__ import annotations

import pytest
from soak.mutated_files import KINDS, soak


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused_in_words(kind: str) -> None:
    assert soak(kind, 25)[0] > 0
