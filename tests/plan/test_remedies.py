"""Uses of memory, the longest sequence and changes that lengthen it, compared with numbers worked out by hand."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest
from helpers.plans.forecasts import MEMORY, MODEL, TOKEN_BYTES

from hf_longctx.cli.main import build_parser
from hf_longctx.cli.plan import request_of
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.plan.model.model_spec import ModelSpec, PackedSpec
from hf_longctx.plan.setup import DeviceMemory, Placement, fitting_remedies, lora_adapters, remedies, rooms, wider_job
from hf_longctx.sim.scenario import Request, build_scenario

# weights and gradients of 4 bytes, two moments of 4 bytes
WHOLE = 1312 * 16
# weights are gathered; in a backward the head's gradients wait beside those of two layers of 576 weights, what other ranks send
# of the largest matrix, and a share of the sum
GATHERED = 4 * (1312 + 80 + 2 * 576 + 8 * 16 + 576 // 4)
REPLICATED = Placement(4, "replicated", 1, (1, 2, 4), "auto")
SHARDED = replace(REPLICATED, parameters="sharded", shard_ranks=4)


def test_the_model_of_these_tests_has_the_numbers_of_its_comment() -> None:
    assert (MODEL.num_parameters, saved_token_bytes(MODEL)) == (1312, 1296)
    assert MEMORY.usable_bytes == 80_000


def test_tokens_fill_what_the_states_leave() -> None:
    # 80,000 - 20,992 = 59,008 bytes hold 38 tokens of 1,516
    assert MEMORY.state_bytes("replicated", 1) == WHOLE
    assert MEMORY.tokens_per_rank("replicated", 1, False) == 38
    # 80,000 - 20,992 / 4 - 11,264 = 63,488 bytes
    assert MEMORY.state_bytes("sharded", 4) == WHOLE // 4 + GATHERED
    assert MEMORY.tokens_per_rank("sharded", 4, False) == 41
    assert MEMORY.left_bytes("sharded", 4) == 63_488
    assert MEMORY.kept_bytes(41, False) == 41 * TOKEN_BYTES <= 63_488 < MEMORY.kept_bytes(42, False)


def test_states_that_do_not_fit_leave_no_tokens() -> None:
    assert replace(MEMORY, usable_bytes=WHOLE - 1).tokens_per_rank("replicated", 1, False) == 0


def test_measured_states_are_bytes_per_parameter_shared_by_the_ranks() -> None:
    measured = DeviceMemory(MODEL, 100_000, 50_000, saved_bytes_per_token=500, state_bytes_per_parameter=18)
    assert measured.state_bytes("replicated", 1) == 1312 * 18
    assert measured.state_bytes("sharded", 4) == 1312 * 18 // 4
    # all weights in addition to the shards
    assert measured.state_bytes("gathered_per_round", 4) == 1312 * 18 // 4 + 1312 * 4
    assert measured.tokens_per_rank("sharded", 4, True) == (50_000 - 5_904) // 500
    assert measured.kept_bytes(7, True) == 7 * 500


def test_the_longest_sequence_fills_the_largest_group() -> None:
    assert REPLICATED.longest_tokens(MEMORY) == 4 * 38
    assert replace(REPLICATED, degrees=(1, 2)).longest_tokens(MEMORY) == 2 * 38
    assert replace(REPLICATED, max_tokens_per_rank=7).longest_tokens(MEMORY) == 4 * 7
    assert replace(REPLICATED, max_tokens_per_rank=7000).longest_tokens(MEMORY) == 4 * 38


def lengths_by_remedy(placement: Placement, memory: DeviceMemory = MEMORY) -> dict[str, int]:
    found = remedies(memory, placement)
    assert [remedy.longest_tokens for remedy in found] == sorted((remedy.longest_tokens for remedy in found), reverse=True)
    # adapters have a test of their own
    return {remedy.change: remedy.longest_tokens for remedy in found if "--lora-rank" not in remedy.change}


def test_adapters_are_remedies_by_the_bytes_of_their_states() -> None:
    half = ModelSpec(4, 512, 1024, 8, 8, 64, 1000, 100, bytes_per_element=2, has_master_weights=True)
    found = {one.change: one.longest_tokens for one in remedies(DeviceMemory.by_formula(half, 2**28), REPLICATED)}
    lora, qlora = (next(tokens for change, tokens in found.items() if f"({name})" in change) for name in ("LoRA", "QLoRA"))
    # frozen weights have no copies, gradients and moments
    frozen = replace(half, has_master_weights=False)
    frozen = replace(frozen, adapters=lora_adapters(frozen, 16))
    memory = replace(DeviceMemory.by_formula(frozen, 2**28), lora_rank=16)
    assert lora == REPLICATED.longest_tokens(memory)
    packed = replace(frozen, packed=PackedSpec.nf4(frozen), can_keep_qkv=False)
    assert qlora == REPLICATED.longest_tokens(replace(memory, model=packed))
    # nothing is said of LoRA to those who have it, and nothing of QLoRA to those who have that
    assert not any("(LoRA)" in one.change for one in remedies(memory, REPLICATED))
    assert not any("LoRA" in one.change for one in remedies(replace(memory, model=packed), REPLICATED))


@pytest.mark.quick
def test_every_remedy_is_computed_by_the_same_formula() -> None:
    assert lengths_by_remedy(REPLICATED) == {
        # 160,000 - 20,992 bytes are 91 tokens on each of 4 ranks
        "devices of 0 GiB": 4 * 91,
        # a token in two-byte numbers takes 2 * (328 + 32) + 24 bytes, and 24 * 8 in the last norm: 936; states 1312 * (4 + 8)
        "weights and activations in bf16: --dtype bfloat16": 4 * ((80_000 - 15_744) // 936),
        "2 times the ranks: --gpus 8": 8 * 38,
        "states sharded over 4 ranks: --parameters sharded": 4 * 41,
        # 1312 gradients of 4 bytes stay beside the weights; the host is given what the moments need
        "optimizer states in host memory: --optimizer-states host --host-gib 1, if a rank has that many GiB": 4 * 45,
    }


def test_settings_that_fit_come_before_larger_machines_and_pairs_where_none_does_alone() -> None:
    single = fitting_remedies(MEMORY, REPLICATED, 170)
    assert [one.is_setting for one in single] == sorted((one.is_setting for one in single), reverse=True)
    assert single[0].is_setting and all(one.longest_tokens >= 170 for one in single)
    most = max(one.longest_tokens for one in remedies(MEMORY, REPLICATED) if one.is_setting)
    pairs = [one for one in fitting_remedies(MEMORY, REPLICATED, most + 1) if one.is_setting]
    assert pairs and all(" and " in one.change and one.longest_tokens > most for one in pairs)


@pytest.mark.wide
def test_host_memory_that_a_profile_does_not_have_is_named_with_its_gib() -> None:
    found = build_scenario(Request("llama-3.1-8b", "h200", 1), must_fit=False)
    options = [one for one in fitting_remedies(found.memory, found.placement, 1) if "--optimizer-states" in one.change]
    option, least = options
    # 8.03 billion parameters with fp32 copies and moments, and room for parts on their way, are 121.6 GiB; activations keep 116.4
    assert "(122 GiB a rank): --optimizer-states host --host-gib 239" in option.change
    wide = build_scenario(Request("llama-3.1-8b", "h200", 1, optimizer_states="host", host_bytes=239 * 2**30))
    assert wide.longest_tokens == option.longest_tokens > 900_000
    # the least that holds the states leaves some tenths of a GiB for activations
    assert "(122 GiB a rank): --optimizer-states host --host-gib 122, if" in least.change
    small = build_scenario(Request("llama-3.1-8b", "h200", 1, optimizer_states="host", host_bytes=122 * 2**30))
    assert 0 < small.longest_tokens == least.longest_tokens < option.longest_tokens
    with pytest.raises(ValueError, match=r"needs 121\.6 GiB.*--host-gib 122 or, with 116 GiB for activations, --host-gib 239"):
        build_scenario(Request("llama-3.1-8b", "h200", 1, optimizer_states="host"))


@pytest.mark.wide
def test_a_way_to_train_all_weights_stands_beside_adapters() -> None:
    with pytest.raises(ValueError, match="--lora-rank 16 ") as refusal:
        build_scenario(Request("llama-3.1-70b", "h100", 8))
    joined = (
        r"--optimizer-states host, and weights of layers in host memory[^;:]*: --layer-weights host --host-gib (\d+), if a rank "
    )
    [pair] = re.findall(joined + r"has that many GiB \(up to ([\d,]+)", str(refusal.value))
    request = Request("llama-3.1-70b", "h100", 8, optimizer_states="host", layer_weights="host", host_bytes=int(pair[0]) * 2**30)
    # the refusal counts by formulas; the setup plans, to 1 %
    assert build_scenario(request).longest_tokens == pytest.approx(int(pair[1].replace(",", "")), rel=0.011)


@pytest.mark.wide
def test_a_change_gets_the_host_memory_that_it_frees() -> None:
    # with adapters in place of states on the host, their memory is free for activations
    whole = build_scenario(Request("qwen3.5-27b", "h100-nvl", 8, optimizer_states="host", parameters="sharded"))
    [found] = [one for one in remedies(whole.memory, whole.placement) if one.change.endswith("(LoRA): --lora-rank 16")]
    lora = build_scenario(Request("qwen3.5-27b", "h100-nvl", 8, lora_rank=16, parameters="sharded"))
    assert found.longest_tokens == pytest.approx(lora.longest_tokens, rel=0.011) and whole.memory.host_bytes < 10 * 2**30


def test_settings_that_need_more_ranks_are_offered_with_the_fewest() -> None:
    with pytest.raises(ValueError) as refusal:
        build_scenario(Request("qwen3-30b-a3b", "rtx-5090", 1))
    [(num_ranks, tokens)] = re.findall(r"--gpus (\d+) --lora-rank 16 \(up to ([\d,]+)", str(refusal.value))
    held = [build_scenario(Request("qwen3-30b-a3b", "rtx-5090", ranks, lora_rank=16), False).longest_tokens for ranks in (2, 4)]
    assert int(num_ranks) == 4 and not held[0] and held[1] == pytest.approx(int(tokens.replace(",", "")), rel=0.011)


def test_fewer_tokens_over_weights_of_four_bits_are_explained() -> None:
    lora = build_scenario(Request("llama-3.1-8b", "h200", 1, lora_rank=16))
    packed = build_scenario(Request("llama-3.1-8b", "h200", 1, lora_rank=16, quantize="nf4"))
    assert packed.longest_tokens < packed.unquantized_tokens == lora.longest_tokens
    assert any(f"{lora.longest_tokens:,} tokens fit without --quantize" in note for note in packed.notes)
    # where weights are most of the memory, four bits hold more
    small = build_scenario(Request("llama-3.1-8b", "rtx-3090", 1, lora_rank=16, quantize="nf4"))
    assert small.unquantized_tokens == 0 and not any("without --quantize" in note for note in small.notes)


@pytest.mark.quick
def test_every_change_that_a_refusal_offers_makes_the_model_fit() -> None:
    with pytest.raises(ValueError, match="does not fit") as refusal:
        build_scenario(Request("llama-3.1-8b", "h200", 1))
    offers = re.findall(r"(--[^;(]*) \(up to ([\d,]+) tokens\)", str(refusal.value))
    assert len(offers) >= 5
    for text, tokens in offers:
        words = shlex.split(text.split(", ")[0])
        options = build_parser().parse_args(
            ["plan", "--model", "llama-3.1-8b", "--hardware", "h200", *(() if "--gpus" in words else ("--gpus", "1")), *words]
        )
        assert build_scenario(request_of(options, 0)).longest_tokens == int(tokens.replace(",", "")), text


def test_wider_groups_and_a_lifted_bound_are_remedies() -> None:
    found = lengths_by_remedy(replace(REPLICATED, degrees=(1, 2), max_tokens_per_rank=20))
    assert found["leave --tokens-per-rank out"] == 2 * 38
    assert found["groups of up to 4 ranks: --degrees"] == 4 * 20
    # MODEL has four heads, so Ulysses stops at four of eight ranks
    eight = replace(REPLICATED, num_ranks=8, method="ulysses")
    assert lengths_by_remedy(eight)["groups of up to 8 ranks: --method auto"] == 8 * 38


def test_states_shared_by_a_few_ranks_may_be_shared_by_all() -> None:
    # 80,000 - 20,992 / 2 - 11,840 = 57,664 bytes hold 38 tokens; sharding over all four ranks allows 41
    found = lengths_by_remedy(replace(SHARDED, shard_ranks=2))
    assert found["states sharded over all ranks: --shard-ranks 4"] == 4 * 41
    # eight ranks still share states in pairs
    assert found["2 times the ranks: --gpus 8"] == 8 * 38


def test_a_measured_model_is_not_offered_another_number_format() -> None:
    measured = replace(MEMORY, state_bytes_per_parameter=16)
    assert not any("bf16" in change for change in lengths_by_remedy(SHARDED, measured))


def test_a_change_that_gains_nothing_is_no_remedy() -> None:
    halves = DeviceMemory.by_formula(replace(MODEL, bytes_per_element=2), 100_000)
    assert set(lengths_by_remedy(SHARDED, halves)) == {"devices of 0 GiB", "2 times the ranks: --gpus 8"}


def test_ranks_are_doubled_until_a_sequence_fits() -> None:
    # replicated: 38 tokens on each rank
    assert wider_job(MEMORY, REPLICATED, 8, 304).num_ranks == 8
    assert wider_job(MEMORY, REPLICATED, 8, 305).num_ranks == 16
    # more ranks do not help if states are replicated, and the search ends
    tiny = replace(MEMORY, usable_bytes=100)
    assert wider_job(tiny, REPLICATED, 8, 1).longest_tokens(tiny) == 0


def test_a_single_rank_shares_its_states_with_new_ones() -> None:
    one = Placement(1, "replicated", 1, (1,), "auto")
    two = wider_job(MEMORY, one, 2, 1)
    assert (two.parameters, two.shard_ranks, two.degrees) == ("sharded", 2, (1, 2))


def test_rooms_compare_all_ways_of_keeping_the_states() -> None:
    found = {room.parameters: room for room in rooms(MEMORY, REPLICATED)}
    assert {name: room.state_bytes for name, room in found.items()} == {
        "replicated": WHOLE,
        "sharded": WHOLE // 4 + GATHERED,
        "gathered_per_step": WHOLE // 4 + GATHERED,
        "gathered_per_round": WHOLE // 4 + GATHERED,
    }
    assert [room.tokens_per_rank for room in found.values()] == [38, 41, 41, 41]
    assert [room.longest_tokens for room in found.values()] == [152, 164, 164, 164]
    assert {room.parameters: room.state_bytes for room in rooms(MEMORY, replace(SHARDED, shard_ranks=2))}["sharded"] == 22_336


def test_a_single_rank_has_one_way_to_keep_its_states() -> None:
    assert [room.parameters for room in rooms(MEMORY, Placement(1, "replicated", 1, (1,), "auto"))] == ["replicated"]


@pytest.mark.parametrize("num_tokens", [0, 1, 38])
def test_what_fits_by_one_function_fits_by_the_other(num_tokens: int) -> None:
    assert MEMORY.kept_bytes(num_tokens, True) <= MEMORY.left_bytes("replicated", 1)
