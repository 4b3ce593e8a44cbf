"""Draws of config.json files with one or two fields changed to values that no model has, forecast in this process.

    python -m tests.soak.odd_configs 20000

Every draw must end in a forecast or in a ValueError.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hf_longctx.plan.cost.public_configs import CONFIGS
from hf_longctx.sim.forecast import make_forecast
from hf_longctx.sim.scenario import Request, build_scenario

VALUES: list[Any] = [0, -2, None, "x", 1e30, [], {}, True, 2.5, [0], ["x"], float("nan"), 1, 3, 10**12, "", [None], {"a": 1}]
# families whose mixers are read from fields of their own, in small sizes
SMALL: dict[str, dict[str, Any]] = {
    kind: {
        **{"model_type": kind, "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512, "sliding_window": 16, **fields},
    }
    for kind, fields in {
        "mamba": {"state_size": 8, "expand": 2, "conv_kernel": 4, "time_step_rank": "auto"},
        "mamba2": {"state_size": 8, "expand": 2, "num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 16},
        "jamba": {"mamba_d_state": 8, "mamba_expand": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
        "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16},
        "bamba": {"mamba_n_heads": 4, "mamba_d_state": 8, "attn_layer_indices": [1], "mamba_expand": 2},
        "zamba2": {"n_mamba_heads": 4, "mamba_d_state": 8, "num_mem_blocks": 1, "adapter_rank": 4},
        "rwkv": {"attention_hidden_size": 64},
        "xlstm": {"num_heads": 4, "chunk_size": 16},
        "minimax": {"block_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        "recurrent_gemma": {"lru_width": 64, "block_types": ["recurrent", "attention"]},
        "lfm2": {"conv_L_cache": 3, "full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": True, "block_multiple_of": 8},
        "olmo_hybrid": {
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
        "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128},
        "gemma4_text": {"head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [32, 16]},
        "deepseek_v32": {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "index_topk": 8, "index_head_dim": 8},
        "llava": {"text_config": {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 9}},
        "bert": {},
    }.items()
}


def mutated(drawn: random.Random) -> dict[str, Any]:
    """A config with one or two of its fields, or of those inside one of them, changed or gone."""
    config = copy.deepcopy(drawn.choice([*CONFIGS.values(), *SMALL.values()]))
    for _ in range(drawn.choice((1, 1, 2))):
        place: Any = config
        name = drawn.choice(sorted(place))
        if isinstance(place[name], dict) and place[name] and drawn.random() < 0.7:
            place = place[name]
            name = drawn.choice(sorted(place))
        if drawn.random() < 0.1:
            del place[name]
        else:
            place[name] = drawn.choice(VALUES)
        if not config:
            break
    return config


def outcomes(count: int, seed: int, folder: Path) -> Counter[str]:
    """Numbers of draws that were forecast, refused, or ended in another error, which is named with its config."""
    drawn, found, path = random.Random(seed), Counter[str](), folder / "config.json"
    for _ in range(count):
        config = mutated(drawn)
        path.write_text(json.dumps(config))
        try:
            scenario = build_scenario(
                Request(str(path), "h100", drawn.choice((1, 8)), lora_rank=drawn.choice((0, 0, 16))), must_fit=False
            )
            if drawn.random() < 0.05:
                make_forecast(scenario, None, 1, 1, 0)
            found["forecast"] += 1
        except ValueError:
            found["refused"] += 1
        except Exception as error:
            found[f"{type(error).__name__}: {error} for {str(config)[:300]}"] += 1
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        for outcome, number in outcomes(int(sys.argv[1]), int(sys.argv[2] if len(sys.argv) > 2 else 0), Path(name)).most_common():
            print(number, outcome)
