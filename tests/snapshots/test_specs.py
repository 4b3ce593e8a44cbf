"""Pins specs, kernels, kinds of layers and reasons of refusals: `specs.json` has a hash of each.

Inputs are the default configs of all config classes of transformers, the shapes that the package knows by name, and a tiny model
of every causal, multimodal and classifying class. A failing test prints the values that changed.

To see old and new values, run `PYTHONPATH=tests python tests/snapshots/test_specs.py llama LlamaForCausalLM` with the keys in
question, here and in a checkout of the commit that wrote the file (`git log tests/snapshots/specs.json`). Where a change is
meant, `PYTHONPATH=tests python tests/snapshots/test_specs.py --write` pins it.

Defaults of configs and modules of models belong to one version of transformers, which the file names. With another version only
named shapes are compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.measures.snapshots import Values, check, result_of, show, write
from helpers.models.any_model import build_any, class_names
from helpers.models.classifiers import HEADS
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from hf_longctx import LongContextConfig
from hf_longctx.hf.models.experts import spread_problems
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.heads import CLASSIFIERS
from hf_longctx.hf.models.logits import head_problem
from hf_longctx.hf.models.spec import config_spec, model_spec
from hf_longctx.hf.rules.arguments import setup_problems
from hf_longctx.hf.rules.classes import class_problem
from hf_longctx.plan.cost.catalog import model_names, named_model, named_type
from hf_longctx.plan.model.config import has_position_table, kept_reason, kernels_of_config
from hf_longctx.plan.model.layers import layer_kinds
from hf_longctx.plan.model.model_spec import ModelSpec

PINNED = Path(__file__).parent / "specs.json"


@cache
def pinned_version() -> str:
    return str(json.loads(PINNED.read_text())["transformers"])


@pytest.fixture
def same_transformers() -> Iterator[None]:
    """Skips with another version, and leaves the warnings of hundreds of default configs out of a failure's report."""
    if transformers.__version__ != pinned_version():
        pytest.skip(f"defaults of configs are pinned for transformers {pinned_version()}, not {transformers.__version__}")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(before)


def named_shapes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Shapes that the package knows, each with 2 and 4 bytes per element, and the type of its decoder."""
    for name in model_names():
        yield name, {"2 bytes": asdict(named_model(name)), "4 bytes": asdict(named_model(name, 4)), "type": named_type(name)}


def default_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Specs of every type of config by its file, as it is loaded, and by its text config alone; then what tables say of it."""
    for model_type in CONFIG_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:
            # transformers has no defaults for it
            continue
        yield model_type, values_of(config)


def values_of(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "file": result_of(lambda: asdict(ModelSpec.from_config(config.to_dict()))),
        "loaded": result_of(lambda: asdict(config_spec(config))),
        "text config": result_of(lambda: asdict(ModelSpec.from_config(config.get_text_config().to_dict()))),
        "traits": result_of(lambda: traits_of(config)),
    }


def traits_of(config: PretrainedConfig) -> dict[str, Any]:
    """Kernels, kinds of layers, and what else is known of a type of config beside its spec."""
    fields = config.to_dict()
    return {
        "kernels": kernels_of_config(fields),
        "keeps all": kept_reason(fields),
        "position table": has_position_table(fields),
        "layers": result_of(lambda: kinds_of_layers(ModelSpec.from_config(fields))),
    }


def kinds_of_layers(spec: ModelSpec) -> list[Any]:
    return [asdict(kind) for kind in layer_kinds(spec.windows, spec.states, spec.heads)]


def causal_names() -> list[str]:
    """Causal language models, and multimodal models by the names of transformers."""
    wrappers = {name for name in dir(transformers) if name.endswith("ForConditionalGeneration")}
    listed = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    return sorted({*class_names(), *wrappers, *(name for name in listed if isinstance(name, str))})


def classifier_names() -> list[str]:
    others = ("Auto", "DataCollator")
    return sorted(name for name in dir(transformers) if name.endswith(tuple(CLASSIFIERS)) and not name.startswith(others))


def tiny_models(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Specs of tiny models, and why runs refuse them on one rank, in two stages, and with experts spread over two ranks."""
    for name in names:
        settings = next((HEADS[head] for ending, head in _HEADS.items() if name.endswith(ending)), {})
        with torch.device("meta"):
            try:
                model = build_any(name, is_random=False, **settings)
            except Exception:
                # no tiny config of the class is known, so only its name can be asked about
                model = None
        if model is None:
            yield name, {"refused": result_of(lambda name=name: class_problem(without_modules(name)))}
        elif problem := class_problem(model):
            yield name, {"refused": problem}
        else:
            # without values, a model is refused for that
            yield name, facts_of(build_any(name, is_random=False, **settings))


_HEADS = {"ForSequenceClassification": "classes", "ForTokenClassification": "tokens"}


def facts_of(model: Any) -> dict[str, Any]:
    alone = setup_problems(ModelFacts.of(model), None, LongContextConfig(), 1, (1,))
    staged = setup_problems(ModelFacts.of(model), None, LongContextConfig(stages=2), 2, (1,))
    return {
        "spec": result_of(lambda: asdict(model_spec(model))),
        "problems": alone,
        "problems of stages": [problem for problem in staged if problem not in alone],
        "others": {"head": head_problem(model), "spreads experts": not spread_problems(model, 2)},
    }


def without_modules(name: str) -> Any:
    """An instance of a class of transformers that has nothing inside."""
    cls = getattr(transformers, name)
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    return model


def test_named_shapes_are_as_they_were() -> None:
    check(PINNED, "named shapes", dict(named_shapes()))


@pytest.mark.usefixtures("same_transformers")
def test_specs_of_default_configs_are_as_they_were() -> None:
    check(PINNED, "configs", dict(default_configs()))


@pytest.mark.slow
@pytest.mark.usefixtures("same_transformers")
def test_specs_and_refusals_of_models_are_as_they_were() -> None:
    check(PINNED, "models", dict(tiny_models(causal_names())))


@pytest.mark.slow
@pytest.mark.usefixtures("same_transformers")
def test_specs_and_refusals_of_classifiers_are_as_they_were() -> None:
    check(PINNED, "classifiers", dict(tiny_models(classifier_names())))


def all_groups() -> dict[str, Values]:
    return {
        "named shapes": dict(named_shapes()),
        "configs": dict(default_configs()),
        "models": dict(tiny_models(causal_names())),
        "classifiers": dict(tiny_models(classifier_names())),
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write(PINNED, all_groups(), transformers=transformers.__version__)
    else:
        show(all_groups(), sys.argv[1:])
