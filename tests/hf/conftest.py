"""Rows of the trainings that are compared with one plain process."""

from __future__ import annotations

import pytest
from helpers.models.reference import random_rows
from helpers.trainers.trainer_runs import SKEWED, Rows


@pytest.fixture(scope="session")
def rows() -> Rows:
    """A long row and 39 short ones."""
    return random_rows(SKEWED)
