"""The user's settings: defaults, what is refused and how it is said, and the road from a command line."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments

import hf_longctx
from hf_longctx.hf.config import LongContextConfig


def test_defaults_are_accepted() -> None:
    config = LongContextConfig()
    assert (config.long_sequences, config.solver, config.degrees) == ("error", "auto", None)


def test_the_class_is_the_package_name_for_it() -> None:
    assert hf_longctx.LongContextConfig is LongContextConfig


SPREAD = {"expert_ranks": 2, "parameters": "sharded"}
# settings -> what the message says: the name, the value and the remedy
REFUSED = {
    "parameters": (
        {"parameters": "zero3"},
        "parameters is 'zero3'; choose one of replicated, gathered_per_round, gathered_per_step, gathered_per_node, sharded",
    ),
    "shards of nothing": (
        {"shard_ranks": 4},
        "shard_ranks is 4 but parameters are 'replicated', and only sharded ones have copies; leave shard_ranks out, or set "
        "parameters='sharded'",
    ),
    "shards of one": (
        {"shard_ranks": 1, "parameters": "sharded"},
        "shard_ranks is 1; give at least 2 ranks, or parameters='replicated'",
    ),
    "spread experts with other shards": (
        {**SPREAD, "shard_ranks": 8},
        "expert_ranks is 2 but shard_ranks is 8; experts are spread over the ranks that share one copy",
    ),
    "spread experts that are replicated": (
        {**SPREAD, "parameters": "replicated"},
        "expert_ranks is 2 but parameters are 'replicated'; tokens travel between ranks that run the same layers",
    ),
    "max_length zero": ({"max_length": 0}, "max_length is 0; give a positive number"),
    "max_length negative": ({"max_length": -5}, "max_length is -5; give a positive number"),
    "tokens_per_rank": ({"tokens_per_rank": 0}, "tokens_per_rank is 0; give a positive number of tokens or leave it out"),
    "activations": ({"activations": "drop"}, "activations is 'drop'; choose one of auto, keep"),
    "device_gib": ({"device_gib": 0.0}, "device_gib is 0.0; give more than 0 or leave it out"),
    "host_gib": ({"host_gib": -1.0}, "host_gib is -1.0; it cannot be negative (0: nothing is offloaded)"),
    "host_gib for nothing": (
        {"host_gib": 1.0, "activations": "keep"},
        "host_gib is 1.0 but activations are 'keep', which offloads nothing; leave one out",
    ),
    "tile_tokens": ({"tile_tokens": -1}, "tile_tokens is -1; it cannot be negative (0: untiled)"),
    "lookahead_batches": ({"lookahead_batches": 0}, "lookahead_batches is 0; at least 1 global batch must be read ahead"),
    "stream_readers": ({"stream_readers": 0}, "stream_readers is 0; give the number of readers, 1 for rank 0 alone"),
    "tokens_per_step": ({"tokens_per_step": -1}, "tokens_per_step is -1; give a positive number of tokens or leave it out"),
    "long_sequences": ({"long_sequences": "drop"}, "long_sequences is 'drop'; choose one of error, truncate, split"),
    "solver": ({"solver": "fast"}, "solver is 'fast'; choose one of auto, greedy, lp, milp, static"),
    "static_degree without its solver": (
        {"static_degree": 2},
        "static_degree is 2 but solver is 'auto'; it has an effect with solver 'static' only",
    ),
    "negative static_degree": ({"solver": "static", "static_degree": -1}, "static_degree is -1; it cannot be negative"),
    "no degrees": ({"degrees": []}, "degrees is []; give positive group sizes, for example [1, 2, 4]"),
    "degree zero": ({"degrees": [0, 1]}, "degrees is [0, 1]; give positive group sizes"),
    "a word that is no degree": (
        {"degrees": "any"},
        "degrees is any; give positive group sizes, for example [1, 2, 4], or 'all'",
    ),
    "all and more": ({"degrees": ["all", "3"]}, "degrees is ['all', '3']; give positive group sizes"),
    "calibration_steps": ({"calibration_steps": -1}, "calibration_steps is -1; it cannot be negative"),
    "timeline_steps": ({"timeline_steps": -2}, "timeline_steps is -2; it cannot be negative"),
    "micro_batch_trials": ({"micro_batch_trials": 0}, "micro_batch_trials is 0; at least 1 is needed"),
    "no time-out": ({"collective_timeout_s": 0.0}, "collective_timeout_s is 0.0; give a positive number of seconds"),
    "no time for the solver": ({"solver_time_limit_s": 0.0}, "solver_time_limit_s is 0.0; give a positive number of seconds"),
    "negative time-out": ({"collective_timeout_s": -3.0}, "collective_timeout_s is -3.0; give a positive number of seconds"),
}


# values that no setting has, or only some: types, ranges, sizes, and what compares or converts in a strange way
ODD = [None, True, False, 0, 1, -1, 2, 3, 2**31, 2**40, 2**63, 2**64, -(2**70), 10**400, 0.5, 1.0, -0.0, 1e300, 1e-300]
ODD += [math.nan, math.inf, -math.inf, 1j, "", "abc", "auto", "all", "1", "2.5", "nan", "None", "x" * 10**6, b"1", "\0", "١"]
ODD += [[], [1], [0], [1.7], ["1"], [True], [None], [[1]], ["all", "all"], [1] * 10**5, {}, {"a": 1}, {1}, (1, 2), range(3)]
ODD += [object(), int, len, Fraction(1, 3), Decimal("1.5"), Decimal("NaN"), np.int64(4), np.float32(2.0), np.bool_(True)]
ODD += [np.array(3), np.array([1, 2]), torch.tensor(3), torch.tensor([1.0, 2.0]), ...]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LongContextConfig)])
def test_a_setting_is_kept_in_its_type_or_refused_by_its_name(name: str) -> None:
    # a flag that the run decides where it is left out
    own = bool if name == "compile_layers" else type(getattr(LongContextConfig(), name))
    num_refused = 0
    for value in ODD:
        try:
            kept = getattr(LongContextConfig(**{name: value}), name)
        except ValueError as error:
            num_refused += 1
            assert name in str(error) and len(str(error)) < 400, value
        else:
            assert type(kept) in (own, int, float, str, list) or kept is None, value
            assert not isinstance(kept, float) or math.isfinite(kept)
            assert own is bool or not isinstance(kept, bool), value
    assert num_refused > len(ODD) // 2


def test_a_setting_changed_after_construction_is_checked_again() -> None:
    config = LongContextConfig()
    config.max_length = math.nan
    with pytest.raises(ValueError, match="max_length is nan"):
        config.check()


@pytest.mark.quick
@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_setting_is_refused_with_its_value_and_remedy(name: str) -> None:
    settings, message = REFUSED[name]
    with pytest.raises(ValueError) as refused:
        LongContextConfig(**settings)
    assert message in str(refused.value)


ACCEPTED = {
    "least": {"max_length": 1, "tokens_per_rank": 1, "tokens_per_step": 1, "micro_batch_trials": 1},
    "nothing measured or drawn": {"calibration_steps": 0, "timeline_steps": 0},
    "static": {"solver": "static", "static_degree": 4},
    "static, best degree": {"solver": "static"},
    "integer programs": {"solver": "milp", "solver_time_limit_s": 3.0},
    "degrees in any order": {"degrees": [4, 1]},
    "every degree": {"degrees": "all"},
    "FlexSP": {"nested": False, "time_aware": False, "node_aligned": False},
    "split": {"long_sequences": "split"},
    "truncate": {"long_sequences": "truncate"},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_possible_setting_is_kept(name: str) -> None:
    config = LongContextConfig(**ACCEPTED[name])
    assert {field: getattr(config, field) for field in ACCEPTED[name]} == ACCEPTED[name]


def test_every_setting_has_a_help_text() -> None:
    assert all(field.metadata.get("help") for field in dataclasses.fields(LongContextConfig))


def parse(*words: str) -> LongContextConfig:
    (config,) = HfArgumentParser(LongContextConfig).parse_args_into_dataclasses(list(words))
    return config


def test_no_arguments_give_the_defaults() -> None:
    assert parse() == LongContextConfig()


def test_every_setting_can_be_given_on_the_command_line() -> None:
    values = {
        "max_length": 4096,
        "long_sequences": "split",
        "tokens_per_rank": 512,
        "activations": "auto",
        "device_gib": 3.5,
        "host_gib": 0.5,
        "tile_tokens": 256,
        "tokens_per_step": 9000,
        "lookahead_batches": 3,
        "stream_readers": 2,
        "degrees": [1, 2],
        "method": "ring",
        "stages": 2,
        "exchange_parts": 2,
        "interleave": 1,
        "lend_stages": True,
        "compile_layers": True,
        "frozen_weights": "fp8",
        "distillation_beta": 0.5,
        "distillation_temperature": 2.0,
        "distillation_weight": 0.9,
        "distillation_top_k": 64,
        "parameters": "sharded",
        "shard_ranks": 2,
        "expert_ranks": 2,
        "solver": "static",
        "static_degree": 2,
        "micro_batch_trials": 3,
        "hardware": "h100",
        "solver_time_limit_s": 2.5,
        "time_aware": False,
        "nested": False,
        "node_aligned": False,
        "calibration_steps": 0,
        "resume_partial": True,
        "async_save": True,
        "collective_timeout_s": 7.5,
        "fp32_gradients": False,
        "fp32_master_weights": False,
        "optimizer_states": "auto",
        "layer_weights": "host",
        "spread_head": False,
        "self_test": False,
        "on_nonfinite": "skip",
        "replica_check_steps": 5,
        "token_metrics": "on",
        "report_steps": False,
        "timeline_steps": 0,
    }
    assert values.keys() == {field.name for field in dataclasses.fields(LongContextConfig)}
    words = []
    for name, value in values.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    assert parse(*words) == LongContextConfig(**values)


def test_flags_need_no_value_on_the_command_line() -> None:
    assert parse("--compile_layers").compile_layers is True and parse().compile_layers is None
    assert parse("--compile_layers", "false").compile_layers is False
    assert parse("--resume_partial").resume_partial is True


def test_the_command_line_refuses_a_word_outside_the_choices(capsys) -> None:
    with pytest.raises(SystemExit):
        parse("--long_sequences", "drop")
    assert "invalid choice: 'drop'" in capsys.readouterr().err


def test_no_name_is_one_of_the_training_arguments() -> None:
    ours, theirs = ({field.name for field in dataclasses.fields(c)} for c in (LongContextConfig, TrainingArguments))
    assert not ours & theirs


@pytest.mark.quick
def test_both_classes_are_parsed_from_one_command_line(tmp_path) -> None:
    parser = HfArgumentParser([TrainingArguments, LongContextConfig])
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--seed", "7", "--degrees", "1", "2", "4", "--max_length", "99"]
    args, config = parser.parse_args_into_dataclasses(words)
    assert (args.seed, config.degrees, config.max_length) == (7, [1, 2, 4], 99)


def test_settings_from_a_mapping_as_of_a_yaml_file() -> None:
    (config,) = HfArgumentParser(LongContextConfig).parse_dict({"degrees": [1, 2], "report_steps": False})
    assert config == LongContextConfig(degrees=[1, 2], report_steps=False)


def test_all_degrees_are_one_word_on_every_road() -> None:
    (from_yaml,) = HfArgumentParser(LongContextConfig).parse_dict({"degrees": "all"})
    assert parse("--degrees", "all") == from_yaml == LongContextConfig(degrees="all") == LongContextConfig(degrees=["all"])
    assert from_yaml.degrees == "all"


@pytest.mark.parametrize("given,found", [("auto", "auto"), ("2", 2), (4, 4)])
def test_stages_are_a_number_or_auto(given, found) -> None:
    assert LongContextConfig(stages=given).stages == found


@pytest.mark.parametrize("given", [0, -1, "two", "1.5", 2.5])
def test_other_stages_are_refused(given) -> None:
    with pytest.raises(ValueError, match="give a number of pipeline stages, 1 for none, or 'auto'"):
        LongContextConfig(stages=given)


def test_no_layer_range_is_refused() -> None:
    with pytest.raises(ValueError, match="interleave is 0; give the layer ranges of every pipeline stage, 1 for one each"):
        LongContextConfig(interleave=0)


def test_stages_of_several_layer_ranges_lend_no_ranks() -> None:
    with pytest.raises(ValueError, match="lend_stages is set and interleave is 2; stages of several layer ranges lend no ranks"):
        LongContextConfig(stages=2, interleave=2, lend_stages=True)


def test_an_integer_without_end_is_refused_by_the_name_of_its_setting() -> None:
    # Python does not write out integers of so many digits
    for value in (10**5000, -(10**5000), [10**5000]):
        with pytest.raises(ValueError, match=r"degrees is .*\(an integer of 16610 bits\)"):
            LongContextConfig(degrees=value)
