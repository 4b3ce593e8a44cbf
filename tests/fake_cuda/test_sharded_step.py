"""A step of rank 0 of 2 with sharded parameters, a sequence group by Ulysses and offloading: the host waits for nothing.

Collectives move nothing, so only the order of work, streams and waits are tested here; values are tested on gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice
from fake_cuda.test_training import small_model
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.self_test.rounded import find_rounded
from hf_longctx.plan.core.sharding import rank_pieces
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    LayerRange,
    Parameters,
    RankPlan,
    SequenceGroup,
    Span,
    StagePlan,
)
from hf_longctx.recipes.bench.one_document import replayed
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.round import StepResult
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters.rounded import note_rounded, noted_rounded
from hf_longctx.runtime.parameters.sharded import layer_shards, shard_mesh, shard_model
from hf_longctx.runtime.process_groups import GroupPool

CUDA = torch.device("cuda", 0)
TOKENS = 64


def sharded_model(is_autocast: bool = False, layers_on_host: bool = False) -> Any:
    model = small_model()
    if is_autocast:
        model = model.float()
        note_rounded(model, find_rounded(model, CUDA, None))
        # the head, and the matrices of a layer
        assert len(noted_rounded(model)) == 1 + 7
        model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(model.forward)
    patch_model(model)
    shard_model(model, ("LlamaDecoderLayer",), shard_mesh("cuda", 2, 60.0), layers_on_host=layers_on_host)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    return model


@contextmanager
def steps_of(model: Any, parameters: Parameters, words: str = "0F0 0B0") -> Iterator[Callable[[], StepResult]]:
    """Context of a function that runs a step of this rank with these actions."""
    pool, tier = GroupPool((1, 2), 60.0, control=dist.new_group()), HostTier.on(CUDA, 1 << 22)
    engine = ActivationEngine(layer_modules(model), tier, OutputHead(output_head(model)))
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, CUDA, True)
    actions = tuple(map(Action.parse, words.split()))
    chunks = tuple(Chunk(place, (Span(place, 0, TOKENS),)) for place in range(len(actions) // 2))
    layers = replayed(attention_host=1.0, input_host=1.0), replayed(), replayed(attention_host=1.0)
    policies = tuple(ActivationPolicy(chunk.index, 0, layers, 16) for chunk in chunks)
    stage = StagePlan(0, (LayerRange(0, 3),), actions, policies)
    group = SequenceGroup((0, 1), "ulysses", chunks, (stage,))
    plan = RankPlan(0, 0, parameters, ((group, stage),))
    own = sum(piece.num_tokens for piece in rank_pieces(chunks[0], group.shape)[0])
    ids, positions = torch.arange(own)[None], torch.arange(own)[None]
    inputs = ChunkInputs(ids, positions, ids).pin_memory()
    yield lambda: executor.run(plan, [[inputs] * len(chunks)], TOKENS, engine=engine)
    engine.unbind()
    pool.close()


@pytest.mark.parametrize("is_autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize(
    "parameters,on_host",
    [("sharded", False), ("gathered_per_round", False), ("gathered_per_step", False), ("sharded", True)],
    ids=str,
)
def test_the_host_waits_for_nothing(
    parameters: Parameters, on_host: bool, is_autocast: bool, two_ranks: None, device: FakeDevice, computing: Computing
) -> None:
    model = sharded_model(is_autocast, on_host)
    with steps_of(model, parameters) as run:
        for step in range(3):
            temporaries, pinned = computing.num_temporaries, device.count("cudaHostRegister")
            with device.waits() as waits:
                result = run()
            # the first step makes tables of heads
            assert step == 0 or waits == []
            # copies to the host take no room on the device
            assert computing.num_temporaries == temporaries
            assert device.count("cudaHostRegister") == pinned
            for parameter in model.parameters():
                parameter.grad = None
            # all memory that the step held, with that which a stream still reads
            assert result.memory.device_peak >= torch.cuda.memory_stats()["active_bytes.all.peak"] > 0
        assert torch.isfinite(result.loss)


def test_the_device_has_the_shards_of_two_layers_while_a_step_computes(two_ranks: None, device: FakeDevice) -> None:
    model = sharded_model(layers_on_host=True)
    layers = model.model.layers
    shard_bytes = sum(weight.to_local().nbytes for layer in layers for weight in layer.parameters())
    slots = layer_shards(model)._slots
    # gaps between weights apart, and all but equal layers
    assert sum(slot.memory.nbytes for slot in slots) == pytest.approx(2 * shard_bytes / len(layers), rel=0.01)
    held: list[int] = []
    hook = layers[0].register_forward_pre_hook(lambda *_: held.append(torch.cuda.memory_allocated()))
    with steps_of(model, "sharded") as run:
        run()
        torch.cuda.synchronize()
        for parameter in model.parameters():
            parameter.grad = None
        held.clear()
        rest = torch.cuda.memory_allocated()
        run()
    hook.remove()
    # the first forward: gathered weights of layer, embedding and head are there, and what they were gathered in
    gathered = sum(weight.nbytes for weight in (*layers[0].parameters(), model.lm_head.weight, model.model.embed_tokens.weight))
    assert held[0] - rest <= 2 * gathered - shard_bytes
