"""The table of classes whose runs keep everything says what the models themselves say, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.models.any_model import build_any

from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.hf.models.classes import TESTED_MODELS
from hf_longctx.hf.models.layers import head_problem
from hf_longctx.hf.models.wrapped.classes import WRAPPED_MODELS
from hf_longctx.plan.core.configs.kept import KEPT, kept_reason


def said(config: Any) -> tuple[bool, bool]:
    """Whether the table says that the class changes its logits, and that its layers cannot be recomputed."""
    text = config.get_text_config()
    rows = [row for row in KEPT if text.model_type in row.model_types]
    changes = any(row.field and getattr(text, row.field) is not None for row in rows)
    return changes, any(not row.field for row in rows)


def found(model: Any) -> tuple[bool, bool]:
    """Whether the model itself changes its logits, and whether its layers cannot be recomputed."""
    changes, problem = head_problem(model), activation_problem(model)
    return bool(changes), problem not in ("", changes)


@pytest.mark.slow
def test_the_table_says_of_every_class_what_its_models_say() -> None:
    wrong: dict[str, Any] = {}
    kinds: set[tuple[str, str]] = set()
    for name in (*TESTED_MODELS, *WRAPPED_MODELS):
        model = build_any(name, is_random=False)
        text: Any = model.config.get_text_config()
        fields = [row.field for row in KEPT if row.field and text.model_type in row.model_types]
        kinds |= {(text.model_type, row.field) for row in KEPT if text.model_type in row.model_types}
        # the default, and with every field of the table set to a number and to nothing
        changes: list[dict[str, Any]] = [{}, *({field: value} for field in fields for value in (1.5, None))]
        for change in changes:
            for field, value in change.items():
                # some classes refuse to be given nothing
                vars(text)[field] = value
            if (table := said(model.config)) != (itself := found(model)):
                wrong[f"{name} {change}"] = f"table {table}, model {itself}: {activation_problem(model)}"
            assert bool(kept_reason(model.config.to_dict())) == any(table)
    assert not wrong
    # a row whose model type no class has would never be missed
    assert kinds == {(kind, row.field) for row in KEPT for kind in row.model_types}
