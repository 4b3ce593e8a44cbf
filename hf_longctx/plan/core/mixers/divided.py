"""Sizes of mixers whose outputs are divided by sums of weights, RWKV and xLSTM, from the fields of a model's config.

Their MLPs count as parts of the mixers, since no layer of these models has attention. Tests compare saved bytes, parameters and
bytes sent with those of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_longctx.plan.core.mixers.state_spec import ScanSize, StateSpec

# elements that RWKV's attention saves, in blocks of 16 tokens: 17 x 17 weights, which the state is one of, and their logarithms;
# three numbers
MEANS_SCAN = ScanSize(39, 16)


def mlstm_scan(key_size: int, value_size: int, tile_tokens: int) -> ScanSize:
    """Elements that the scan of an mLSTM saves, with keys of k and values of v elements and tiles of t tokens.

    Four t x t matrices of a tile, 4 t; queries, keys and keys with their weights, 3 k; values, what queries read and the outputs,
    3 v; a memory for each tile, k (v + 1) / t; thirteen numbers and two for each tile. A mask that all heads share is left out.
    """
    k, v, t = key_size, value_size, tile_tokens
    return ScanSize(4 * t + 3 * k + 3 * v + -(-(k * (v + 1) + 2) // t) + 13, t)


def rwkv(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a layer of RWKV, whose MLP reads the token before each token, so that it counts as a part of the mixer.

    Saved, for a attention channels and m channels of the MLP. In the model's format: the tokens before, and the mixes of both, of
    attention and of the MLP, 7 hidden sizes; the MLP's value and gate, 2 more; means, gate and their product, 3 a; the MLP's
    activation and its square, 2 m.
    """
    hidden = int(config["hidden_size"])
    channels = int(config.get("attention_hidden_size") or hidden)
    inner = int(config.get("intermediate_size") or 4 * hidden)
    return StateSpec(
        # key, value, gate and back; the MLP's key, value and gate
        parameters=4 * hidden * channels + 2 * hidden * inner + hidden * hidden,
        heads=channels,
        convolutions=2,
        head_elements=2,
        tail_elements=2 * hidden,
        # a weight, and its product with a value, for each token of a block and the state
        scan_products=2 * channels * (MEANS_SCAN.tile_tokens + 1),
        read_heads=channels,
        own_size=2,
        out_size=1,
        carry_elements=1,
        carry_products=4 * channels,
        # two sums for each channel, and two numbers that all of them share
        carry_wide=2 * channels + 2,
        saved_elements=9 * hidden + 3 * channels + 2 * inner,
        work_wide=4 * channels,
        scan_elements=MEANS_SCAN.token_elements,
        tile_tokens=MEANS_SCAN.tile_tokens,
    )


def xlstm(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a layer of xLSTM, whose MLP counts as a part of the mixer, since no layer has attention.

    Saved outside the scan, for v elements of all values and m of the MLP. In the model's format: output of the scan, its norm,
    the gate and their product, 4 v; gates of the memory; the MLP's input and its gate, activation, value and product, 4 m. In
    fp32: the norm's input and output, 2 v, and a number for each head.
    """
    hidden, heads, tile = int(config["hidden_size"]), int(config["num_heads"]), int(config.get("chunk_size") or 64)
    keys, values = int(hidden * config.get("qk_dim_factor", 0.5)), int(hidden * config.get("v_dim_factor", 1.0))
    multiple = int(config.get("ffn_round_up_to_multiple_of") or 64)
    inner = int((hidden * config.get("ffn_proj_factor", 2.667) + multiple - 1) // multiple) * multiple
    key, value = keys // heads, values // heads
    return StateSpec(
        # queries, keys, values, gate and back, gates of the memory; and the MLP
        parameters=hidden * (2 * keys + 3 * values + 2 * heads) + 3 * hidden * inner,
        heads=heads,
        convolutions=0,
        head_elements=(key + 1) * (value + 1),
        scan_products=heads * (tile * (key + value + 1) + 2 * key * (value + 1)),
        read_heads=heads,
        own_size=2 * key + value + 2,
        out_size=value,
        carry_elements=1,
        carry_products=heads * key * (value + 1),
        # queries; outputs before they are divided, and what queries read from an earlier state; decays and largest weights
        carry_wide=keys + 2 * values + 7 * heads,
        carry_copied=heads,
        saved_elements=4 * values + 2 * heads + hidden + 4 * inner,
        saved_wide=2 * values + heads,
        work_wide=heads * (2 * key + value + 4 * tile),
        scan_elements=mlstm_scan(key, value, tile).token_elements,
        tile_tokens=tile,
    )
