"""Bytes that LoRA on all matrices of a Llama layer reads and writes per token, one node per matrix and one per input.

    python recipes/bench/cpu/adapter_traffic.py [--hidden 4096] [--inner 14336] [--heads 32] [--kv-heads 8] [--rank 16]

Counts what every operation of a forward and a backward in bf16 reads and writes, as torch dispatches it. Weights do not
count. "Each matrix": every adapter reads its input and adds its output to that of the frozen matrix
afterwards, which is how adapters run beside weights in four bits. "Each input": projections of one input are one node
(`runtime/core/products.py`). Products with frozen matrices are apart, since arithmetic hides their memory traffic: what
moves into them costs no time of its own.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_longctx.hf.models import low_rank
from hf_longctx.hf.models.kernels import FusedLayers

# few, and no multiple of a rank, by which products with adapters are recognised
TOKENS = 50
# parts of a layer's traffic, in the order of the report
READS_X = "x read by products with A"
WRITES_Y = "outputs of adapters written, or read and written"
READS_DY = "gradients of outputs read by adapters"
READS_X_BACK = "x read for gradients of A"
WRITES_DX = "gradients of x by products with A"
SUMS = "sums of gradients, and of the residual, forward and backward"
FROZEN = "(products with frozen matrices)"
OTHERS = "(all other operations)"
PARTS = (READS_X, WRITES_Y, READS_DY, READS_X_BACK, WRITES_DX, SUMS, FROZEN, OTHERS)


class Moved(TorchDispatchMode):
    """Adds up bytes of tokens that operations read and write, by part. is_backward: set while a backward runs."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.is_backward = rank, False
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if func.is_view or name.startswith(("detach", "empty", "new_", "_unsafe_view", "split")):
            return out
        # an addend that is multiplied by zero is not read
        unread = args[:1] if (kwargs or {}).get("beta") == 0 else ()
        read = [each for each in tree_leaves(args[len(unread) :]) if isinstance(each, torch.Tensor) and TOKENS in each.shape]
        written = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor) and TOKENS in each.shape]
        self.bytes[self._part(name, args)] += sum(each.nbytes for each in (*read, *written))
        return out

    def _part(self, name: str, args: Any) -> str:
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            (rows, inner), columns = left.shape, right.shape[1]
            thin = [size for size in (rows, inner, columns) if size % self.rank == 0 and size <= 3 * self.rank]
            if not thin:
                return FROZEN
            if not self.is_backward:
                return READS_X if columns in thin else WRITES_Y
            if rows == TOKENS:
                return WRITES_DX if inner in thin else READS_DY
            return READS_X_BACK if rows in thin else READS_DY
        return SUMS if name in ("add", "add_") else OTHERS


@contextmanager
def one_node_each() -> Iterator[None]:
    """Context in which every adapter is a node of its own, behind that of the frozen matrix."""
    product = low_rank._product
    low_rank._product = lambda *given: None
    try:
        yield
    finally:
        low_rank._product = product


def layer_bytes(config: LlamaConfig, rank: int) -> Counter[str]:
    """Bytes per token of a layer's forward and backward, by part."""
    with torch.device("meta"):
        base: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        adapters = peft.LoraConfig(r=rank, target_modules="all-linear")
        model: Any = peft.get_peft_model(base, adapters, autocast_adapter_dtype=False)
    # values do not matter
    model.to(torch.bfloat16).to_empty(device="cpu")
    kernels = FusedLayers("")
    kernels.bind(model)
    x_1TC = torch.zeros(1, TOKENS, config.hidden_size, dtype=torch.bfloat16).requires_grad_(True)
    places = tuple(torch.zeros(1, TOKENS, config.head_dim, dtype=torch.bfloat16) for _ in range(2))
    with Moved(rank) as moved:
        y_1TC = model.get_base_model().model.layers[0](x_1TC * 1, position_embeddings=places)
        moved.is_backward = True
        y_1TC.backward(torch.zeros_like(y_1TC))
    kernels.close()
    return Counter({part: count // TOKENS for part, count in moved.bytes.items()})


def main() -> None:
    """Prints bytes per token of each part, and of all but the products with frozen matrices."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size (default: 4096)")
    parser.add_argument("--inner", type=int, default=14336, help="inner size of the MLP (default: 14336)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads (default: 8)")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (default: 16)")
    arguments = parser.parse_args()
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.inner,
        num_hidden_layers=1,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        vocab_size=64,
        attn_implementation="sdpa",
    )
    with one_node_each():
        before = layer_bytes(config, arguments.rank)
    after = layer_bytes(config, arguments.rank)
    print(f"KB per token and layer, rank {arguments.rank}, bf16:          each matrix   each input")
    for part in PARTS:
        print(f"  {part:62} {before[part] / 1e3:9.1f} {after[part] / 1e3:11.1f}")
    sums = [sum(count for part, count in each.items() if part != FROZEN) / 1e3 for each in (before, after)]
    print(f"  {'all but products with frozen matrices':62} {sums[0]:9.1f} {sums[1]:11.1f}")


if __name__ == "__main__":
    main()
