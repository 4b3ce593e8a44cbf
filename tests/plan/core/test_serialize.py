"""Plans as JSON: nothing is lost, equal plans have equal digests, and errors name the field that is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.plans.fixture_plans import FIXTURE_NAMES, edited, fixture, fixture_text

from hf_longctx.plan.core.serialize import SCHEMA_VERSION, plan_digest, plan_from_json, plan_to_json
from hf_longctx.plan.core.types import Estimate


def test_the_hand_written_plans_are_all_there() -> None:
    assert set(FIXTURE_NAMES) >= {
        "flexsp",
        "seq1f1b",
        "infinipipe",
        "sppo",
        "interleaved",
        "lent",
        "nested",
        "layer_first",
        "pp_sp_replicas",
    }


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_a_plan_survives_json_and_json_survives_a_plan(name: str) -> None:
    plan = fixture(name)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan_from_json(plan_to_json(plan, indent=2)) == plan
    # the hand-written files leave out defaults, as the writer does, so both have the same JSON content
    assert json.loads(plan_to_json(plan)) == json.loads(fixture_text(name))


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_equal_plans_give_equal_text_and_digest(name: str) -> None:
    assert plan_to_json(fixture(name)) == plan_to_json(fixture(name))
    assert len(plan_digest(fixture(name))) == 16


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_the_digest_ignores_the_estimate(name: str) -> None:
    plan = fixture(name)
    estimate = Estimate(1.0, 0.5, 10, 20, 0.1, "exact", "measured")
    assert plan_digest(dataclasses.replace(plan, estimate=estimate)) == plan_digest(plan)


def _leaves(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
    if children is None:
        yield path
        return
    for key, child in children:
        yield from _leaves(child, (*path, key))


def _changed(value: Any) -> Any:
    if isinstance(value, str):
        swaps = {
            "local": "ring",
            "ulysses": "hybrid",
            "ring": "ulysses",
            "hybrid": "ring",
            "sharded": "replicated",
            "replicated": "sharded",
            "gathered_per_round": "sharded",
            "layer_input": "mlp",
            "attention_output": "mlp",
            "qkv": "mlp",
            "mlp": "qkv",
        }
        # every other string is a list of actions: drop the last one
        return swaps[value] if value in swaps else " ".join(value.split()[:-1])
    return value + 1


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_the_digest_changes_with_every_single_value_but_the_estimate(name: str) -> None:
    data = json.loads(fixture_text(name))
    digests = {plan_digest(fixture(name))}
    paths = [path for path in _leaves(data) if path[0] not in ("schema", "estimate")]
    for path in paths:
        changed = json.loads(fixture_text(name))
        node = changed
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = _changed(node[path[-1]])
        digests.add(plan_digest(plan_from_json(json.dumps(changed))))
    assert len(digests) == len(paths) + 1


def test_the_digest_changes_with_the_order_of_actions_and_of_micro_batches() -> None:
    plan = fixture("nested")
    assert plan_digest(dataclasses.replace(plan, micro_batches=plan.micro_batches[::-1])) != plan_digest(plan)
    path = "micro_batches__1__groups__0__stages__0__actions"
    assert plan_digest(edited("nested", **{path: "0F0 0F1 0B1 0B0"})) != plan_digest(plan)


def test_fields_that_hold_their_default_may_be_left_out() -> None:
    # an empty list of activations and "part": 0 are defaults
    assert edited("flexsp", micro_batches__0__groups__0__stages__0__activations=[]) == fixture("flexsp")
    assert '"part"' not in plan_to_json(fixture("sppo"))


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_another_schema_version_is_refused(schema: Any) -> None:
    data = json.loads(fixture_text("flexsp")) | {"schema": schema}
    with pytest.raises(ValueError, match=f"reads schema {SCHEMA_VERSION}"):
        plan_from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["[]", "1", '"plan"', "{}"])
def test_json_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="schema"):
        plan_from_json(text)


_GROUP = "micro_batches__0__groups__0"
_GROUP_PATH = r"plan\.micro_batches\[0\]\.groups\[0\]"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("colour", "red", r"plan: unknown field 'colour' of StepPlan"),
        (f"{_GROUP}__rank", 1, rf"{_GROUP_PATH}: unknown field 'rank' of SequenceGroup"),
        (f"{_GROUP}__chunks__0__length", 1, rf"{_GROUP_PATH}\.chunks\[0\]: unknown field 'length'"),
        ("estimate__seconds", 1, r"plan\.estimate: unknown field 'seconds'"),
        ("step", "7", r"plan\.step: expected an integer, found '7'"),
        ("step", True, r"plan\.step: expected an integer, found True"),
        ("step", 7.5, r"plan\.step: expected an integer, found 7\.5"),
        ("lengths", 24000, r"plan\.lengths: expected a list"),
        ("lengths__1", "3000", r"plan\.lengths\[1\]: expected an integer"),
        ("parameters", "frozen", r"plan\.parameters: 'frozen' is not one of replicated"),
        ("micro_batches", {}, r"plan\.micro_batches: expected a list"),
        ("micro_batches__0", [], r"plan\.micro_batches\[0\]: expected an object with the fields of MicroBatch"),
        (f"{_GROUP}__method", "magic", rf"{_GROUP_PATH}\.method: 'magic' is not one of local"),
        (f"{_GROUP}__method", 3, rf"{_GROUP_PATH}\.method: 3 is not one of local"),
        (f"{_GROUP}__positions", [0, "1"], rf"{_GROUP_PATH}\.positions\[1\]: expected an integer"),
        (f"{_GROUP}__chunks__0__spans__0", [0, 0], rf"{_GROUP_PATH}\.chunks\[0\]\.spans\[0\]: expected \[sequence, start"),
        (f"{_GROUP}__chunks__0__spans__0", [0, 0, 1.5], rf"{_GROUP_PATH}\.chunks\[0\]\.spans\[0\]: expected an integer"),
        (f"{_GROUP}__chunks__0__spans", "0:10", rf"{_GROUP_PATH}\.chunks\[0\]\.spans: expected a list"),
        (f"{_GROUP}__stages__0__actions", ["0F0"], rf"{_GROUP_PATH}\.stages\[0\]\.actions: expected actions in one string"),
        (f"{_GROUP}__stages__0__parts__0__num_layers", None, rf"{_GROUP_PATH}\.stages\[0\]\.parts\[0\]\.num_layers: exp"),
        ("estimate__step_s", "fast", r"plan\.estimate\.step_s: expected a number"),
        ("estimate__step_s", True, r"plan\.estimate\.step_s: expected a number"),
        ("estimate__solver", 3, r"plan\.estimate\.solver: expected a string"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        edited("flexsp", **{path: value})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("activations__0__layers__0__shares__0__tensor_class", "heads", r"shares\[0\]\.tensor_class: 'heads' is not one of"),
        ("activations__0__layers__0__shares__0__nvme", 0.5, r"shares\[0\]: unknown field 'nvme' of TensorShare; known are"),
        ("activations__0__layers__0__shares__0__host", "all", r"shares\[0\]\.host: expected a number, found 'all'"),
        ("activations__0__layers__0", [], r"layers\[0\]: expected an object with the fields of LayerPolicy"),
        ("activations__0__tile_tokens", 1.5, r"activations\[0\]\.tile_tokens: expected an integer"),
    ],
)
def test_a_wrong_policy_is_refused_with_its_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        edited("layer_first", **{f"{_GROUP}__stages__0__{path}": value})


@pytest.mark.parametrize("word", ["0X0", "0D2H0", "0H2D0", "0FREE0"])
def test_an_action_of_an_unknown_kind_is_refused_with_its_place(word: str) -> None:
    message = rf"{_GROUP_PATH}\.stages\[0\]\.actions: '{word}' is not an action.*KIND one of F, B, SF, RF, SB, RB, H$"
    with pytest.raises(ValueError, match=message):
        edited("flexsp", **{f"{_GROUP}__stages__0__actions": f"0F0 {word} 0B0"})


@pytest.mark.parametrize(
    ("parents", "field"),
    [((), "lengths"), (("micro_batches", 0, "groups", 0), "method"), (("micro_batches", 0, "groups", 0, "chunks", 0), "index")],
)
def test_a_missing_field_is_named(parents: tuple[str | int, ...], field: str) -> None:
    data = json.loads(fixture_text("flexsp"))
    node: Any = data
    for key in parents:
        node = node[key]
    del node[field]
    with pytest.raises(ValueError, match=f"field '{field}' of .* is missing"):
        plan_from_json(json.dumps(data))
