"""The registry of functions that run as kernels says what the models themselves say, for every class that runs."""

from __future__ import annotations

from helpers.models.any_model import build_any

from hf_longctx.families.registry import FAMILIES, TESTED_MODELS, WRAPPED_MODELS
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.states import KERNELS, mixer_of
from hf_longctx.hf.run.run import _covered
from hf_longctx.plan.model.config import kernels_of_config

# kernels of a model like Llama
ALL = {
    **{"fuses_norms": True, "fuses_gated_norms": False, "fuses_gates": True, "fuses_rotary": True},
    **{"fuses_convolutions": False, "fuses_scans": False},
}


def test_the_table_says_of_every_class_what_its_models_say() -> None:
    wrong: dict[str, str] = {}
    kinds: set[str] = set()
    for name in (*TESTED_MODELS, *WRAPPED_MODELS):
        model = build_any(name, is_random=False)
        kind = model.config.get_text_config().model_type
        kinds.add(kind)
        covered, fields = _covered(FusedLayers("compile"), model), kernels_of_config(model.config.to_dict())
        # a package's, if it is installed
        known = mixer_of(base_of(model))
        assert fields.pop("fuses_scans") == (known is not None and any(each in KERNELS for each in known.functions))
        if covered != fields:
            wrong[name] = f"table {fields}, model {covered}"
    assert not wrong
    # a family whose model types no class has would never be missed
    assert all(kinds & {*family.model_types} for family in FAMILIES if family.traits.kernels)


def test_configs_without_the_type_of_their_decoder_have_its_kernels() -> None:
    assert kernels_of_config({"model_type": "qwen2_vl"}) == ALL
    assert kernels_of_config({"model_type": "llava", "text_config": {"model_type": "llama"}}) == ALL
    assert not any(kernels_of_config({"model_type": "gpt2"}).values())


def test_an_activation_without_a_kernel_is_the_models_own() -> None:
    assert kernels_of_config({"model_type": "llama", "hidden_act": "relu2"}) == {**ALL, "fuses_gates": False}
