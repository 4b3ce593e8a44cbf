"""Activation policies, hand-written and random, for the chunks of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from helpers.models.tiny_models import NUM_LAYERS
from hypothesis import strategies as st

from hf_longctx.plan.core.types import ActivationPolicy, LayerPolicy, MicroBatch, SequenceGroup, StepPlan, TensorShare
from hf_longctx.plan.core.validate import validate_plan


def replayed(
    recompute: float = 0.0, host: float = 0.0, mlp: float = 1.0, input_host: float = 0.0, head_pieces: int = 1
) -> LayerPolicy:
    """Policy of a replayed layer.

    recompute, host: shares of the attention output that are recomputed and that wait on the host; the rest stays on the device.
    mlp: share of the MLP's inner tensors that is recomputed. input_host: share of the layer's input that waits on the host.
    head_pieces: pieces of heads in which attention runs.
    """
    return LayerPolicy(
        (
            TensorShare("layer_input", host=input_host, device=1 - input_host),
            TensorShare("attention_output", recompute=recompute, host=host, device=max(0.0, 1 - recompute - host)),
            TensorShare("qkv", recompute=1.0),
            TensorShare("mlp", recompute=mlp, device=1 - mlp),
        ),
        head_pieces,
    )


@st.composite
def layer_policies(draw: st.DrawFn) -> LayerPolicy:
    """Random policies: shares in hundredths that sum to 1, and now and then a layer that keeps everything."""
    if draw(st.integers(0, 7)) == 7:
        return LayerPolicy()
    recompute = draw(st.sampled_from([0, 100]) | st.integers(0, 100))
    host = draw(st.sampled_from([0, 100 - recompute]) | st.integers(0, 100 - recompute))
    mlp, input_host = draw(st.integers(0, 100)), draw(st.sampled_from([0, 50, 100]))
    return replayed(recompute / 100, host / 100, mlp / 100, input_host / 100)


def random_layer(data: st.DataObject) -> LayerPolicy:
    """Shares in hundredths, also recomputed ones for every class except the layer input; often the ends 0 and 1."""
    hundredths = st.one_of(st.sampled_from([0, 100]), st.integers(0, 100))
    shares = []
    for name in ("layer_input", "attention_output", "qkv", "mlp"):
        recompute = 0 if name == "layer_input" else data.draw(hundredths)
        host = min(100 - recompute, data.draw(hundredths))
        shares.append(TensorShare(name, recompute=recompute / 100, host=host / 100, device=(100 - recompute - host) / 100))
    return LayerPolicy(tuple(shares))


@st.composite
def policies_for(draw: st.DrawFn, plan: StepPlan) -> StepPlan:
    """The plan with a random policy for every chunk; a chunk may have none."""
    (group,) = plan.micro_batches[0].groups
    chosen = []
    for chunk in group.chunks:
        layers = tuple(draw(st.lists(layer_policies(), max_size=NUM_LAYERS)))
        settings = draw(st.sampled_from([0, 1, 5, 64])), draw(st.integers(1, 3))
        chosen.append(ActivationPolicy(chunk.index, 0, layers, *settings))
    return with_policies(plan, chosen, validated=False)


def offloading(
    host: float = 0.0, recompute: float = 1.0, mlp: float = 1.0, qkv: float = 1.0, head_pieces: int = 1
) -> LayerPolicy:
    """Policy of a replayed layer: of what is not recomputed, the share `host` waits on the host, but nothing of the MLP does.

    head_pieces: see `replayed`.
    """
    kept = 1 - recompute
    return LayerPolicy(
        (
            TensorShare("layer_input", host=host, device=1 - host),
            TensorShare("attention_output", recompute=recompute, host=host * kept, device=(1 - host) * kept),
            TensorShare("qkv", recompute=qkv, host=host * (1 - qkv), device=(1 - host) * (1 - qkv)),
            TensorShare("mlp", recompute=mlp, device=1 - mlp),
        ),
        head_pieces,
    )


def with_policies(plan: StepPlan, policies: Sequence[ActivationPolicy], validated: bool = True) -> StepPlan:
    """The plan with these policies, one after the other, for all chunks and layer ranges of all stages."""
    given = iter(policies)

    def of_group(group: SequenceGroup) -> SequenceGroup:
        stages = tuple(
            replace(
                stage,
                activations=tuple(
                    replace(
                        policy, chunk=chunk.index, layer_range=place, layers=policy.layers[: stage.layer_ranges[place].num_layers]
                    )
                    for chunk in group.chunks
                    for place in range(len(stage.layer_ranges))
                    if (policy := next(given))
                ),
            )
            for stage in group.stages
        )
        return replace(group, stages=stages)

    batches = tuple(MicroBatch(tuple(map(of_group, each.groups))) for each in plan.micro_batches)
    plan = replace(plan, micro_batches=batches)
    return validate_plan(plan) if validated else plan


def num_policies(plan: StepPlan) -> int:
    """Number of policies that `with_policies` takes."""
    return sum(
        len(group.chunks) * len(stage.layer_ranges)
        for each in plan.micro_batches
        for group in each.groups
        for stage in group.stages
    )


def same_policy(plan: StepPlan, *layers: LayerPolicy, tile_tokens: int = 0) -> StepPlan:
    """The plan of one stage with the same policy for every chunk, not validated."""
    policy = ActivationPolicy(0, 0, layers, tile_tokens)
    return with_policies(plan, [policy] * num_policies(plan), validated=False)
