"""The table of classes whose runs keep everything says what the models themselves say, and nothing else."""

from __future__ import annotations

import pytest
from helpers.models.any_model import build_any

from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.hf.models.classes import TESTED_MODELS
from hf_longctx.hf.models.wrapped.classes import WRAPPED_MODELS
from hf_longctx.plan.model.config import KEPT, kept_reason


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
    # a row whose model type no class has would never be missed
    assert {kind for row in KEPT for kind in row.model_types} <= kinds
