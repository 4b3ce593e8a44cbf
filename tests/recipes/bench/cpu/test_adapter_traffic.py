"""Adapters of one input move the bytes that a count by hand gives, in one node and in one for each matrix."""

from __future__ import annotations

from transformers import LlamaConfig

from hf_longctx.recipes.bench.cpu import adapter_traffic as traffic

HIDDEN, KV, INNER = 256, 64, 896
# outputs of the seven matrices, their inputs, and inputs that differ
OUTPUTS = 3 * HIDDEN + 2 * KV + 2 * INNER
INPUTS, DISTINCT = 6 * HIDDEN + INNER, 3 * HIDDEN + INNER


def test_bytes_of_adapters_are_those_counted_by_hand() -> None:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=64,
        attn_implementation="sdpa",
    )
    rank = 16
    with traffic.one_node_each():
        before = traffic.layer_bytes(config, rank)
    after = traffic.layer_bytes(config, rank)
    low = 2 * rank
    assert before[traffic.READS_X] == 2 * INPUTS + 7 * low and after[traffic.READS_X] == 2 * DISTINCT + 7 * low
    assert before[traffic.READS_X_BACK] == 2 * INPUTS + 7 * low and after[traffic.READS_X_BACK] == 2 * DISTINCT + 7 * low
    assert before[traffic.WRITES_DX] == 2 * INPUTS + 7 * low and after[traffic.WRITES_DX] == 2 * DISTINCT + 7 * low
    # read and written, and only written before the frozen product is added
    assert before[traffic.WRITES_Y] == 4 * OUTPUTS + 7 * low and after[traffic.WRITES_Y] == 2 * OUTPUTS + 7 * low
    assert before[traffic.READS_DY] == after[traffic.READS_DY] == 4 * OUTPUTS + 14 * low
    # for every input, adapter and frozen matrix are added; then inputs of three and of two matrices are summed; each sum reads
    # two tensors and writes one
    saved = before[traffic.SUMS] - after[traffic.SUMS]
    assert saved == 6 * INPUTS + 6 * (INPUTS - DISTINCT)
    # frozen products read what they add to, forward and backward
    assert after[traffic.FROZEN] - before[traffic.FROZEN] == 2 * OUTPUTS + 2 * INPUTS
    assert after[traffic.OTHERS] == before[traffic.OTHERS]
