"""Prints how many more tokens a sequence may have that is alone in its group, where it may be cut into slices.

    python recipes/bench/cpu/longest_alone.py

LoRA of rank 16 on H100s, with less and more memory beside the model: the longest sequence in one chunk, the longest alone, what a
plan does with it, and its predicted seconds. "found in" is the CPU's time for the search, which a run makes once.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from hf_longctx.plan.core.settings import ClusterSpec, PlannerConfig, default_degrees
from hf_longctx.plan.core.types import Parameters
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.cost.traffic import plainest_shape
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import may_rerun, most_tokens
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.policies.fit import longest_alone
from hf_longctx.plan.setup import lora_adapters

MODELS = ("gpt-oss-20b", "gemma-4-26b-a4b", "qwen3-8b")
# GiB of the device beside the model, and of the host
ROOMS = ((8, 0), (8, 64), (20, 0), (20, 64))


def main() -> None:
    heads = f"{'one chunk':>10} {'alone':>10} {'more':>6} {'slices':>7} {'s':>7} {'found in':>9}"
    print(f"{'model':>16} {'GPUs':>5} {'GiB + host':>11} {heads}")
    for name in MODELS:
        for num_ranks in (1, 8):
            for device_gib, host_gib in ROOMS:
                print_row(name, num_ranks, device_gib, host_gib)


def print_row(name: str, num_ranks: int, device_gib: int, host_gib: int) -> None:
    model, cluster = named_model(name), ClusterSpec(num_ranks, num_ranks, read_profile("h100").spec)
    model = replace(model, adapters=lora_adapters(model, 16))
    parameters: Parameters = "sharded" if num_ranks > 1 else "replicated"
    costs = CostModel(model, cluster, default_coefficients(model, cluster), parameters=parameters, shard_ranks=num_ranks)
    degrees, shape = default_degrees(num_ranks, model.num_heads), plainest_shape(num_ranks, "auto", model, cluster)
    budget = ByteModel(model).budget(device_gib << 30, host_gib << 30, is_shared=num_ranks > 1)
    ways: dict[str, Any] = {"reruns": may_rerun(model, parameters), "head_pieces": model.head_pieces(shape.ulysses)}
    ways |= {"is_shared": num_ranks > 1, "block_ranks": shape.ulysses}
    most = max(budget.kept_tokens, most_tokens(model, budget.device_bytes, budget.host_bytes, budget.tile_tokens, **ways))
    room, started_s = num_ranks * most, time.process_time()
    longest = longest_alone(model, budget, shape, parameters, num_ranks, known=room, most=4 * room)
    found_ms = 1e3 * (time.process_time() - started_s)
    plan = plan_step(0, [longest], costs, PlannerConfig(most, degrees, activations=budget, longest_tokens=longest))
    slices = len(plan.micro_batches[0].groups[0].chunks)
    memory = f"{device_gib} + {host_gib}"
    print(
        f"{name:>16} {num_ranks:>5} {memory:>11} {room:>10,} {longest:>10,} {longest / room - 1:>6.0%} {slices:>7} "
        f"{plan.estimate.step_s:>7.1f} {found_ms:>6.0f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
