"""Sizes of a mixture of experts, as a model's config gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# values of `model_type` whose layers have an MLP only where they have attention, which reads the embeddings beside hidden states
SHARED_TYPES = ("zamba", "zamba2")


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Sizes of the routed experts of a mixture, and over how many ranks they are spread; empty without experts.

    parameters: matrix parameters of all experts of a layer, the mean over layers. token_rows: copies of a token's hidden state
    that go to experts in all layers together, one for each expert that it chooses. num_layers: layers with experts. num_experts:
    experts of such a layer. num_ranks: ranks of a block, among which whole experts are dealt and tokens travel; 1 if experts lie
    where the other weights do. are_rounded: where their weights are gathered, they travel in two bytes.
    """

    parameters: int = 0
    token_rows: int = 0
    num_layers: int = 0
    num_experts: int = 0
    num_ranks: int = 1
    are_rounded: bool = False

    @property
    def spread_parameters(self) -> int:
        """Matrix parameters of a layer that are never gathered, since they are spread over ranks."""
        return self.parameters if self.num_ranks > 1 else 0

    @property
    def travelling_rows(self) -> int:
        """Copies of a token's hidden state that travel between ranks in all layers together, those that stay included."""
        return self.token_rows if self.num_ranks > 1 else 0

    @property
    def are_spread(self) -> bool:
        """Whether tokens travel to experts, so that a layer's MLP runs whole, and a replay runs all of it."""
        return self.num_ranks > 1


NO_EXPERTS = ExpertSpec()
# config fields for the number of experts in a layer
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def expert_sizes(
    config: Mapping[str, Any], num_layers: int, hidden_size: int, dense_size: int, names: Sequence[str]
) -> tuple[int, int, int, ExpertSpec]:
    """Returns `intermediate_size`, `idle_parameters`, `routed_elements`, `experts`; `dense_size` and nothing without experts.

    Granite without experts has only the MLP that otherwise all tokens share. Each chosen expert gets a copy of the token and
    returns one. Experts of GPT-OSS clamp gate and up, which saves three more inner tensors. Experts of Gemma 4 stand beside an
    MLP of every token. In Llama 4 every token runs through all experts, multiplied by zero where it did not choose them.
    """
    num_experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
    chosen = int(config.get("num_experts_per_tok") or 0)
    if is_beside := bool(config.get("enable_moe_block")):
        chosen = int(config.get("top_k_experts") or 0)
    is_nemotron = config.get("model_type") == "nemotron_h"
    dense_names = ("mlp",) if is_nemotron else ("hybrid",) if config.get("model_type") in SHARED_TYPES else ()
    if dense_names:
        dense_size = round(dense_size * sum(name in dense_names for name in names) / num_layers)
    if not num_experts and config.get("model_type") == "granitemoehybrid":
        dense_size = int(config.get("shared_intermediate_size") or dense_size)
    if num_experts < 2 or not chosen or (is_nemotron and "moe" not in names):
        return dense_size, 0, 0, NO_EXPERTS
    size = int(config.get("moe_intermediate_size") or dense_size)
    is_llama4 = config.get("model_type") == "llama4_text"
    if is_llama4:
        chosen, dense_size = num_experts, int(config["intermediate_size_mlp"])
    dense, every = config.get("mlp_only_layers") or (), int(config.get("decoder_sparse_step") or 1)
    first = int(config.get("first_k_dense_replace") or 0)
    has_experts = [layer >= first and layer not in dense and not (layer + 1) % every for layer in range(num_layers)]
    if types := config.get("mlp_layer_types"):
        has_experts = [kind == "sparse" for kind in types]
    if (layers := config.get("moe_layers")) is not None:
        has_experts = [layer in layers for layer in range(num_layers)]
    if period := int(config.get("expert_layer_period") or 0):
        has_experts = [layer % period == int(config.get("expert_layer_offset") or 0) for layer in range(num_layers)]
    if is_nemotron:
        has_experts = [name == "moe" for name in names]
    share = sum(has_experts) / max(1, num_layers)
    shared_sizes = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    shared = next((int(config[name]) for name in shared_sizes if config.get(name)), 0)
    shared = shared or size * int(config.get("n_shared_experts") or is_llama4) + dense_size * is_beside
    passed, matrices = chosen * size + shared, 2 if is_nemotron else 3
    idle = matrices * (num_experts - chosen) * hidden_size * size + num_experts * hidden_size
    routed = 2 * chosen * hidden_size + (3 * chosen * size if config.get("model_type") == "gpt_oss" else 0)
    parameters = round(share * matrices * num_experts * hidden_size * size)
    experts = ExpertSpec(parameters, chosen * sum(has_experts), sum(has_experts), num_experts)
    dense_share = 1 if is_nemotron else 1 - share
    return round(share * passed + dense_share * dense_size), round(share * idle), round(share * routed), experts
