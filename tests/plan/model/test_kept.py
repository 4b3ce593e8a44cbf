"""The families whose runs keep everything are those whose models say so, and no others."""

from __future__ import annotations

import pytest
from helpers.models.any_model import build_any

from hf_longctx.families.registry import FAMILIES, TESTED_MODELS, WRAPPED_MODELS
from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.plan.model.config import kept_reason


@pytest.mark.slow
def test_the_table_says_of_every_class_what_its_models_say() -> None:
    wrong: dict[str, str] = {}
    kinds: set[str] = set()
    for name in (*TESTED_MODELS, *WRAPPED_MODELS):
        model = build_any(name, is_random=False)
        kinds.add(model.config.get_text_config().model_type)
        problem, reason = activation_problem(model), kept_reason(model.config.to_dict())
        if bool(problem) != bool(reason):
            wrong[name] = f"table {reason!r}, model {problem!r}"
    assert not wrong
    # a family whose model types no class has would never be missed
    assert all(kinds & {*family.model_types} for family in FAMILIES if family.traits.keeps_all)
