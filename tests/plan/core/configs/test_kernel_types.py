"""The table of functions that run as kernels says what the models themselves say, for every class that runs."""

from __future__ import annotations

import pytest
from helpers.models.any_model import build_any

from hf_longctx.hf.models.classes import TESTED_MODELS
from hf_longctx.hf.models.fused.bind import FusedLayers
from hf_longctx.hf.models.wrapped.classes import WRAPPED_MODELS
from hf_longctx.plan.core.configs.kernels import KERNELS, kernel_fields


@pytest.mark.slow
def test_the_table_says_of_every_class_what_its_models_say() -> None:
    wrong: dict[str, str] = {}
    kinds: set[str] = set()
    for name in (*TESTED_MODELS, *WRAPPED_MODELS):
        model = build_any(name, is_random=False)
        kind = model.config.get_text_config().model_type
        kinds.add(kind)
        covered, fields = FusedLayers("compile").covered(model), kernel_fields(kind)
        if covered != fields:
            wrong[name] = f"table {fields}, model {covered}"
    assert not wrong
    # a type that no class has would never be missed
    assert set().union(*KERNELS.values()) <= kinds
