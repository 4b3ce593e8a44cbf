"""Extend fitted coefficients to a model with more layers, and turn them into hardware rates for other models.

`hf/calibration` measures a model with a few layers only, and stores the rates in a hardware profile.
"""

from __future__ import annotations

from dataclasses import replace

from hf_longctx.plan.core.cluster_spec import ClusterSpec, HardwareSpec
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.cost.cost_model import CostCoefficients, PassCoefficients


def whole_model_costs(
    few: CostCoefficients, head: CostCoefficients | None, spec: ModelSpec, whole: ModelSpec
) -> CostCoefficients:
    """Coefficients of `whole`, from those of a model with few of its layers (`spec`) and of its output head alone.

    `head` None means that `few` already has all layers. Seconds of layers grow with the number of layers, rates per byte and
    message stay, and the seconds of a step (the gradient reduction) grow with the parameters. The seconds of the head alone
    become its seconds in a pipeline.
    """
    if head is None:
        return few
    times = whole.num_layers / spec.num_layers

    def extend(layers: PassCoefficients, bare: PassCoefficients) -> PassCoefficients:
        def grown(value: float, fixed: float) -> float:
            # because of noise the head alone may have taken longer than head and layers together
            fixed = min(fixed, value)
            return fixed + (value - fixed) * times

        token_s = grown(layers.token_s, bare.token_s)
        head_s, product_s = min(bare.token_s, layers.token_s), token_s * whole.head_share
        return replace(
            layers,
            pair_s=layers.pair_s * times,
            token_s=token_s,
            chunk_s=grown(layers.chunk_s, bare.chunk_s),
            tile_s=layers.tile_s * times,
            head_factor=head_s / product_s if product_s > 0 else layers.head_factor,
        )

    return CostCoefficients(
        extend(few.forward, head.forward),
        extend(few.backward, head.backward),
        few.step_s * whole.num_parameters / spec.num_parameters,
        few.source,
    )


def hardware_rates(spec: ModelSpec, cluster: ClusterSpec, costs: CostCoefficients) -> HardwareSpec:
    """The cluster's hardware with rates that `default_coefficients` turns back into `costs`, as far as possible.

    Measured exchange rates keep their ratio to the link rates, so that the traffic of a chunk is counted as in the fit. A rate
    whose coefficient was fitted as zero stays as it was.
    """
    hardware, forward, backward = cluster.hardware, costs.forward, costs.backward
    matrix = spec.num_layers * spec.layer_products + spec.head_outputs * spec.hidden_size
    pair = spec.num_layers * spec.pair_operations

    def per_second(amount: float, seconds: float, otherwise: float) -> float:
        return amount / seconds if seconds > 0 else otherwise

    link = per_second(2, forward.link_byte_s + backward.link_byte_s, hardware.link_bytes_per_s)
    network = per_second(2, forward.network_byte_s + backward.network_byte_s, hardware.network_bytes_per_s)
    scales = {True: link / hardware.link_bytes_per_s, False: network / hardware.network_bytes_per_s}
    return replace(
        hardware,
        matmul_flops_per_s=per_second(2 * matrix, forward.token_s, hardware.matmul_flops_per_s),
        attention_flops_per_s=per_second(pair, forward.pair_s, hardware.attention_flops_per_s),
        backward_matmul=per_second(backward.token_s, forward.token_s, 0.0) or hardware.backward_matmul,
        backward_attention=per_second(backward.pair_s, forward.pair_s, 0.0) or hardware.backward_attention,
        kernel_s=forward.chunk_s / (20 * spec.num_layers),
        message_s=(forward.message_s + backward.message_s) / 2,
        link_bytes_per_s=link,
        network_bytes_per_s=network,
        exchange_bytes_per_s=tuple(
            (ranks, rate * scales[ranks <= cluster.ranks_per_node]) for ranks, rate in hardware.exchange_bytes_per_s
        ),
    )
