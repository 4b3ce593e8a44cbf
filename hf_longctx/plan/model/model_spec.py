"""Describes a model to the planner: shapes, adapters, packed weights. Plain data, in elements and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_longctx.families.registry import traits_of
from hf_longctx.plan.core.sharding import (
    HEAD_PART_BYTES,
    MOST_HEAD_PARTS,
    RANK_BYTES,
    UNPACKED_AT_ONCE,
    UNPACKED_BYTES,
    HeadParts,
    head_parts,
)
from hf_longctx.plan.core.types import LayerRange, Media, TensorClass
from hf_longctx.plan.model.attention_pairs import FULL, AttentionPairs
from hf_longctx.plan.model.config import (
    NO_EXPERTS,
    NO_POSITIONS,
    ExpertSpec,
    Fields,
    HeadSizes,
    config_fields,
    config_heads,
    expert_sizes,
    largest_heads,
)
from hf_longctx.plan.model.layers import (
    ATTENTION,
    NO_INDEX,
    IndexSpec,
    LayerKind,
    Windows,
    config_index,
    config_states,
    config_windows,
    layer_kinds,
    type_names,
    with_states,
)
from hf_longctx.plan.model.mixers import NO_STATES, StateSpec
from hf_longctx.plan.model.towers import NO_TOWER, TowerSpec


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Sizes of weights that are trained while the model's own are frozen; empty: all weights are trained.

    Frozen matrices save no inputs, so layers save these only for adapters.
    """

    # weights that adapters add to one layer
    layer_parameters: int = 0
    layer_bytes: int = 0
    # bytes per token that adapters outside MLPs, and in them, save for backward, beside inputs that they read without a
    # copy
    attention_saved_bytes: int = 0
    mlp_saved_bytes: int = 0
    # weights that are trained at the embedding and at the head
    first_parameters: int = 0
    first_bytes: int = 0
    last_parameters: int = 0
    last_bytes: int = 0
    # bytes in place of these if attention runs in pieces of heads, and if MLPs run in token tiles, per token of a tile
    cut_bytes: int = 0
    tile_bytes: int = 0
    # whether an adapter reads, without a copy, the output of the first norm for attention, the input of attention's last
    # projection, the output of the second norm for the MLP, and the input of the MLP's last matrix
    reads_first_norm: bool = False
    reads_attention: bool = False
    reads_second_norm: bool = False
    reads_product: bool = False
    # those of `layer_parameters` on experts that a token does not choose
    idle_parameters: int = 0
    # frozen experts run apart from their class's forward, as one node that saves hidden states once, and outputs of their first
    # matrices (`runtime.core.expert_products`)
    splits_experts: bool = False
    # rounded copies of the adapters of all experts of a layer, and their gradients before they are added
    copied_bytes: int = 0

    @property
    def on_experts(self) -> bool:
        """Whether weights of routed experts have adapters."""
        return self.idle_parameters > 0

    @property
    def is_empty(self) -> bool:
        return not (self.layer_parameters or self.first_parameters or self.last_parameters)

    def sizes(self, num_layers: int, is_first: bool, is_last: bool) -> tuple[int, int]:
        """Returns (trained parameters, bytes) of `num_layers` layers, with the embedding if first and the head if last."""
        count = num_layers * self.layer_parameters + is_first * self.first_parameters + is_last * self.last_parameters
        return count, num_layers * self.layer_bytes + is_first * self.first_bytes + is_last * self.last_bytes


# all weights of the model are trained
NO_ADAPTERS = AdapterSpec()


def split_adapters(
    matrices: Sequence[tuple[int, int, int]],
    experts: tuple[int, int],
    elements: tuple[int, int],
    *,
    first_rank: int,
) -> AdapterSpec:
    """Returns what adapters on the experts of a layer save and hold, without their number of parameters.

    matrices: (rank, inputs, outputs) of the adapted matrices. experts: those of a token, and all. elements: bytes of an element
    of the frozen weights, in whose dtype products are made, and of the adapters. first_rank: rank of the adapter on the first
    matrices; 0 without one.
    """
    (num_chosen, num_experts), (element, width), wide = experts, elements, max(4, elements[1])

    def filled(rank: int) -> int:
        return -(-rank * element // RANK_BYTES) * RANK_BYTES

    copied = [(filled(rank) + (wide + width * (width < 4)) * rank) * sum(both) for rank, *both in matrices]
    return AdapterSpec(
        mlp_saved_bytes=num_chosen * filled(first_rank),
        reads_second_norm=first_rank > 0,
        idle_parameters=sum(rank * sum(both) for rank, *both in matrices) * (num_experts - num_chosen),
        splits_experts=True,
        copied_bytes=num_experts * sum(copied),
    )


# (kind, share of layers) of some layers
KindShares = tuple[tuple[LayerKind, float], ...]
# bytes of rounded gradients beside a matrix in fp8 whose bytes are in the other order
FP8_WORKSPACE_BYTES = 2**27
# fields of a config with the cap of logits after the head
_LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# fields of a config with the rate of dropout of attention weights
WEIGHT_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
# place of a row among the choices of all tokens
_ROW_INDEX_BYTES = 4
# bytes of the weights that an update on the host moves and updates at once, unless one weight has more
UPDATE_PART_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """Sizes of frozen layer weights that are stored in a few bits each; empty: weights take `bytes_per_element`."""

    # packed weights of a layer in memory, without adapters
    layer_bytes: int = 0
    # scales of a layer, which every shard holds in full
    layer_scale_bytes: int = 0
    # the largest matrix while a product unpacks it
    unpacked_bytes: int = 0
    # matrix parameters of a layer whose products run in fp8
    fp8_parameters: int = 0
    # experts alone are packed
    has_experts: bool = False

    @classmethod
    def nf4(cls, model: ModelSpec) -> PackedSpec:
        """Sizes of NF4 layers, as in QLoRA: an 8-bit scale per 64 elements, and an fp32 scale per 256 of these scales."""
        count, largest = model.layer_weights, model.largest_dense_matrix * model.bytes_per_element
        return cls(count // 2, -(-count // 64) + 4 * -(-count // (64 * 256)), largest)

    @classmethod
    def fp8(cls, model: ModelSpec) -> PackedSpec:
        """Sizes of layers whose attention and MLPs are in fp8, with an fp32 scale for each row; experts stay as they are."""
        d, inner = model.hidden_size, 0 if model.experts.num_experts else model.intermediate_size
        matrices = [(model.query_size + model.kv_size, d), (d, model.output_size), ((1 + model.gated_mlp) * inner, d), (d, inner)]
        count = sum(rows * columns for rows, columns in matrices)
        own = (model.layer_weights - count) * model.bytes_per_element
        largest = max(rows * columns for rows, columns in matrices)
        return cls(own + count + 4 * sum(rows for rows, columns in matrices if columns), 0, largest + FP8_WORKSPACE_BYTES, count)

    @classmethod
    def of_experts(cls, model: ModelSpec, kind: str) -> PackedSpec:
        """Sizes of experts in MXFP4 or NF4, whose scales take a byte per 32 elements, or in fp8; all other weights are whole."""
        experts = model.experts
        whole = (model.layer_weights - experts.parameters) * model.bytes_per_element
        matrix = experts.row_size * experts.inner_size * (2 if model.gated_mlp else 1)
        at_once = min(UNPACKED_AT_ONCE, experts.num_experts)
        return cls(
            whole + experts.parameters * (33 if kind == "fp8" else 17) // 32,
            0,
            at_once * matrix * UNPACKED_BYTES,
            has_experts=True,
        )

    @property
    def is_empty(self) -> bool:
        return self.layer_bytes == 0

    @property
    def words(self) -> str:
        """Words for the weights, after "over"; empty without packed weights."""
        if self.is_empty:
            return ""
        if self.has_experts:
            return "experts of four bits"
        return "weights in fp8" if self.fp8_parameters else "weights of four bits"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes of a decoder-only model, and how a run holds its weights.

    Matrix parameters are means over layers, of attention and of states too. For a mixture of experts all sizes are means over
    layers. Sizes are in elements, unless the name says bytes.
    """

    num_layers: int
    hidden_size: int
    # sum over the experts that one token passes
    intermediate_size: int
    num_heads: int
    # in a model whose layers differ: those of the layer with the most keys and values
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool = False
    # size of weights and saved activations
    bytes_per_element: int = 4
    # size of queries, keys and values sent between ranks, smaller under autocast; 0: bytes_per_element
    bytes_sent_per_element: int = 0
    # the MLP has gate, up and down, as in Llama, not only up and down, as in GPT
    gated_mlp: bool = True
    # the MLP has up and down alone, whatever it keeps
    two_matrices: bool = False
    # one embedding for each of max_positions
    learned_positions: bool = False
    # queries and keys are normalized
    qk_norms: bool = False
    # a replay can reuse queries, keys and values of the first run
    can_keep_qkv: bool = True
    # MLPs run alone: in token tiles and kept for some tokens, unless their experts are packed; otherwise a replay runs a whole
    # layer with its MLP
    tiles_mlps: bool = True
    # norms inside layers run in token tiles
    tiles_norms: bool = True
    # the norm before the head runs in the tiles of the loss
    tiles_final_norm: bool = True
    # trained weights if the model's own are frozen
    adapters: AdapterSpec = NO_ADAPTERS
    # frozen weights in fewer bits
    packed: PackedSpec = PackedSpec()
    # head size of values; 0: head_dim
    value_head_dim: int = 0
    # size of the latent from which queries are projected; 0: they are projected from hidden states
    query_rank: int = 0
    # size of the latent from which values, and keys except rope_head_dim of each, are projected; 0: from hidden states
    kv_rank: int = 0
    # heads lie in groups, each of which is projected to a latent of this size before attention's last projection; 0: in none
    output_rank: int = 0
    output_groups: int = 0
    # elements of a key that all heads share and that carry the position
    rope_head_dim: int = 0
    # attention scores have a softcap
    caps_scores: bool = False
    # attention weights have dropout
    drops_weights: bool = False
    # most parts in which ranks exchange heads beside attention; 1: all heads before and after it
    exchange_parts: int = MOST_HEAD_PARTS
    # number of last pipeline stages that have the output head and share its work (`stage_layers`)
    num_head_stages: int = 1
    # matrix parameters of a layer that one token does not pass
    idle_parameters: int = 0
    # elements per token and layer that routing to experts and back saves for backward, besides those that experts save inside
    routed_elements: int = 0
    # for each layer the most tokens that a query sees, its own included; None: all before it; 0: no attention; (): all see all
    windows: Windows = ()
    # layers that carry a state along the sequence
    states: StateSpec = NO_STATES
    # an index that chooses the keys of a token
    index: IndexSpec = NO_INDEX
    # attention's output is multiplied by a gate that is projected from hidden states
    gates_output: bool = False
    # norms keep the product before their weight in fp32
    has_wide_norms: bool = False
    # the routed experts of a mixture
    experts: ExpertSpec = NO_EXPERTS
    # every rank holds the weights of all pipeline stages, so that stages can lend their ranks
    keeps_all_stages: bool = False
    # outputs of a head that classifies documents or tokens; 0: the head predicts the next token
    num_labels: int = 0
    # the optimizer updates fp32 copies of trained weights in half precision
    has_master_weights: bool = False
    # elements that attention's projections read; 0: hidden_size
    input_size: int = 0
    # the optimizer's states and these copies lie in host memory
    updates_on_host: bool = False
    # shards of layers lie in host memory while a step computes
    layers_on_host: bool = False
    # ranks of a node, which share its copy of weights that are gathered per node
    node_ranks: int = 1
    # hidden states between layers are in at least fp32
    has_wide_hidden: bool = False
    # elements of a token that a layer passes to the next one beside hidden states
    passed_elements: int = 0
    # every residual and its addend are multiplied by weights first
    scales_residuals: bool = False
    # if everything is kept, keys and values are saved once and not for every query head that reads them, as GPUs' operators in
    # half precision allow, and short documents share calls of attention
    saves_kv_once: bool = False
    # attention may run in pieces of its heads
    cuts_heads: bool = False
    # matrix parameters of a layer, besides those of routed experts, that are gathered in two bytes, since autocast rounds them
    rounded_parameters: int = 0
    # the head is gathered in two bytes, too
    rounds_head: bool = False
    # parameters of a layer that are in fp32, although other weights are in half precision; and whether the head is
    fp32_parameters: int = 0
    fp32_head: bool = False
    # bytes of both moments of a trained parameter if the optimizer keeps them in few bits; 0: the type of the weights it updates
    moment_bytes: float = 0.0
    # bytes of one logit that a cap after the head keeps for backward; 0: no cap
    capped_bytes: int = 0
    # parameters of a multimodal model outside its text model and its head; the first stage holds them, and no token passes them
    tower_parameters: int = 0
    # the tower of images and videos, and what is trained of it
    tower: TowerSpec = NO_TOWER
    # heads of each layer if layers differ
    heads: tuple[HeadSizes, ...] = ()
    # see `HeadSizes`
    num_made: int = 2
    # outputs of attention and of the MLP are normalized before they are added
    norms_results: bool = False
    # values are normalized, too, without a weight
    norms_values: bool = False
    # layers pass keys and values on, even if no later one reads them
    hands_kv_on: bool = False
    # elements of a token that every layer gets as an input of its own, from a table and by a matrix; 0: no such input
    own_input_size: int = 0
    # parameters of that table
    table_parameters: int = 0
    # parameters of a layer that are frozen while the others are trained, as experts or mixers may be
    frozen_parameters: int = 0
    # all norms of layers run as single kernels, which save their inputs alone
    fuses_norms: bool = False
    # so do the gated norms of all layers with a state
    fuses_gated_norms: bool = False
    # so do the short convolutions of all layers with a state, each with its activation
    fuses_convolutions: bool = False
    # a package's kernel runs the scans of all layers with a state
    fuses_scans: bool = False
    # so do the gated activations of all MLPs
    fuses_gates: bool = False
    # so do all rotary embeddings
    fuses_rotary: bool = False

    def __post_init__(self) -> None:
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers; give one for each layer, None for one "
                f"that sees everything, or () for all"
            )
        if self.heads and len(self.heads) != self.num_layers:
            raise ValueError(f"heads has {len(self.heads)} entries for {self.num_layers} layers; give one for each, or ()")
        attending = () if self.states.is_empty else self.states.attending
        if attending and tuple(window != 0 for window in self.windows or (None,) * self.num_layers) != attending:
            raise ValueError(
                f"windows {self.windows} must be 0 in the layers without attention, {attending}, and nowhere else; make them "
                f"with `with_states`"
            )
        if any(window is not None and window < (0 if attending else 1) for window in self.windows):
            raise ValueError(f"windows {self.windows} must be at least one token, or None for a layer that sees everything")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], bytes_per_element: int = 4) -> ModelSpec:
        """Makes the spec from a `config.json` read as a mapping (transformers is not needed).

        Raises ValueError naming the first field that is missing.
        """
        tower, config = TowerSpec.from_config(config), config_fields(config)
        traits = traits_of(config)

        def get(name: str) -> int:
            return int(config[name] if config.get(name) is not None else Fields()[name])

        num_layers, hidden_size = get("num_hidden_layers"), get("hidden_size")
        states = config_states(config, num_layers)
        if states.layers and not any(states.attending):
            # such models number no positions, and have a head for each state
            own = {"num_attention_heads": states.heads, "max_position_embeddings": NO_POSITIONS, "num_key_value_heads": None}
            config = Fields({**config, **own, "head_dim": max(1, hidden_size // states.heads)})
        if traits.mlp == "in_mixer":
            config = Fields({**config, "intermediate_size": 0})
        num_heads = get("num_attention_heads")
        head_dim = int(config.get("head_dim") or hidden_size // num_heads)
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        latent: dict[str, Any] = {}
        if config.get("kv_lora_rank"):
            rope_head_dim, num_kv_heads = get("qk_rope_head_dim"), num_heads
            head_dim = get("qk_nope_head_dim") + rope_head_dim
            value_head_dim = int(config.get("v_head_dim") or hidden_size // num_heads)
            latent = {
                "value_head_dim": 0 if value_head_dim == head_dim else value_head_dim,
                "query_rank": int(config.get("q_lora_rank") or 0),
                "kv_rank": get("kv_lora_rank"),
                "rope_head_dim": rope_head_dim,
            }
        elif config.get("compress_rates"):
            # keys are values, too
            latent = {"query_rank": get("q_lora_rank"), "num_made": 1}
            latent |= {"output_rank": get("o_lora_rank"), "output_groups": get("o_groups")}
        intermediate_size = get("intermediate_size") // traits.mlp_divisor
        if config.get("use_double_wide_mlp"):
            # layers that read keys and values of earlier ones have it; sizes are means over layers
            intermediate_size += round(intermediate_size * int(config.get("num_kv_shared_layers") or 0) / num_layers)
        if interval := int(config.get(traits.image_layers_field) or 0):
            intermediate_size += round(intermediate_size * (num_layers // interval) / num_layers)
        intermediate_size, idle, routed, experts = expert_sizes(
            config, num_layers, hidden_size, intermediate_size, type_names(config, num_layers)
        )
        windows = with_states(config_windows(config, num_layers), states)
        if heads := config_heads(config, windows):
            num_kv_heads, head_dim, _ = largest_heads(heads)
        if num_kv_heads > num_heads:
            raise ValueError(
                f"num_key_value_heads is {num_kv_heads}, but there are num_attention_heads={num_heads}; queries share keys and "
                f"values, so give at most as many"
            )
        own_input_size = int(config.get("hidden_size_per_layer_input") or 0) if traits.layer_inputs else 0
        spec = cls(
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=get("vocab_size"),
            max_positions=get("max_position_embeddings"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            bytes_per_element=bytes_per_element,
            gated_mlp=traits.gated_mlp,
            two_matrices=traits.two_matrices,
            tiles_mlps=traits.tiles_mlps,
            tiles_norms=traits.tiles_norms,
            input_size=2 * hidden_size if traits.mlp == "with_attention" else 0,
            qk_norms=bool(config.get("use_qk_norm", config.get("qk_layernorm", traits.qk_norms))),
            caps_scores=bool(config.get("attn_logit_softcapping")),
            tower_parameters=tower.num_parameters,
            tower=tower,
            fp32_head=traits.fp32_head,
            capped_bytes=bytes_per_element if any(config.get(field) for field in _LOGIT_CAPS) else 0,
            drops_weights=any(config.get(field) for field in WEIGHT_DROPOUT),
            idle_parameters=idle,
            routed_elements=routed,
            windows=windows,
            states=states,
            index=config_index(config, num_layers),
            can_keep_qkv=states.is_empty and not latent and all(own.num_made == 2 for own in heads),
            gates_output=traits.gates_output,
            has_wide_norms=traits.wide_norms,
            has_wide_hidden=traits.wide_hidden and bool(config.get("residual_in_fp32", True)),
            scales_residuals=traits.scales_residuals,
            passed_elements=_passed_elements(config, hidden_size),
            cuts_heads=traits.cuts_heads and not any(config.get(field) for field in WEIGHT_DROPOUT),
            experts=experts,
            heads=heads,
            norms_results=traits.norms_results,
            norms_values=traits.norms_values,
            hands_kv_on=traits.global_heads and bool(heads),
            own_input_size=own_input_size,
            table_parameters=num_layers * own_input_size * int(config.get("vocab_size_per_layer_input") or 0)
            + _ngram_parameters(config, hidden_size),
            **latent,
        )
        return replace(spec, idle_parameters=idle + _shared_blocks(config, spec))

    def head_pieces(self, block_ranks: int = 1) -> int:
        """Most pieces of heads in which attention may run, such that ranks of a block have equally many heads of each."""
        if not self.cuts_heads:
            return 1
        counts = range(self.num_kv_heads, 0, -1)
        return next((n for n in counts if self.num_kv_heads % n == 0 == self.num_heads // n % block_ranks), 1)

    @property
    def runs_mlps_whole(self) -> bool:
        """Whether MLPs run whole, never in token tiles, and a replay runs all of them, for example if experts are spread."""
        return self.experts.are_spread or not self.tiles_mlps or self.packed.has_experts

    @property
    def replayed_classes(self) -> tuple[TensorClass, ...]:
        """Classes that a replay does not reuse, so that policies neither keep nor offload them."""
        unplain: tuple[TensorClass, ...] = () if self.can_keep_qkv else ("qkv",)
        return (*unplain, "mlp") if self.runs_mlps_whole else unplain

    @property
    def query_size(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a token's hidden states between two layers, which stages send, too."""
        e = self.bytes_per_element
        return (max(4, e) if self.has_wide_hidden else e) * self.hidden_size

    @property
    def input_bytes(self) -> int:
        """Bytes per token of a layer's input."""
        e = self.bytes_per_element
        return self.hidden_bytes + e * self.passed_elements

    @property
    def output_size(self) -> int:
        """Elements per token of attention's output, over all heads."""
        return self.num_heads * (self.value_head_dim or self.head_dim)

    @property
    def kv_head_size(self) -> int:
        """Elements of one head's key and value together."""
        return self.head_dim + (self.value_head_dim or self.head_dim)

    @property
    def kv_size(self) -> int:
        """Elements of all keys and values of a token."""
        return self.num_kv_heads * self.kv_head_size

    def head_parts(self, num_ranks: int, own_tokens: float) -> HeadParts | None:
        """Returns the parts in which ranks exchange heads beside attention; None if they exchange all at once.

        own_tokens: tokens of a rank, whose heads must be worth cutting. All layers count as having the model's own heads.
        """
        if num_ranks == 1 or self.value_head_dim or self.drops_weights or not self.index.is_empty:
            return None
        element = self.bytes_sent_per_element or self.bytes_per_element
        sent = own_tokens * (self.num_heads + self.num_kv_heads) * self.kv_head_size * element
        return head_parts(self.num_heads, self.num_kv_heads, num_ranks, int(min(self.exchange_parts, sent / HEAD_PART_BYTES)))

    @property
    def compresses_keys(self) -> bool:
        """Whether layers attend to compressed keys, which all models with grouped outputs do; times count all keys."""
        return self.output_rank > 0

    @property
    def pair_operations(self) -> int:
        """Operations per query-key pair in one layer's forward, over all heads: one product with the key, one with the value.

        Chosen keys save none, since attention computes all pairs and masks those not chosen; their index adds its own operations.
        """
        if self.heads:
            return self._head_mean(lambda own: 4 * self.num_heads * own.head_dim) + self.index.pair_operations
        return 2 * self.num_heads * self.kv_head_size + self.index.pair_operations

    def towers_bytes(self, media: Iterable[Media]) -> int:
        """Bytes that plans leave free on the first stage for one of these images of sequences at a time; 0 without any."""
        tower, sizes = self.tower, (self.bytes_per_element, self.hidden_bytes)
        found = (tower.work_bytes(each, sizes[0]) + tower.feature_bytes(each, sizes[1]) for own in media for each in own)
        return max(found, default=0)

    def attention_pairs(self, layer_ranges: Sequence[LayerRange] = (), tile_keys: int = 0) -> AttentionPairs:
        """Returns the query-key pairs of a layer, averaged over the layers of `layer_ranges`; without any, over all layers.

        Layers without attention have none, and count in the average. If layers have heads of several sizes, pairs count by their
        operations. tile_keys: see `AttentionPairs`.
        """
        if not self.windows and not self.heads:
            return FULL
        kinds = [kind for layer_range in layer_ranges for kind in self.layer_kinds(layer_range)]
        return self.pairs_of(kinds or self.layer_kinds(LayerRange(0, self.num_layers)), tile_keys)

    def pairs_of(self, kinds: Sequence[LayerKind], tile_keys: int = 0) -> AttentionPairs:
        """Returns the query-key pairs of a layer, averaged over layers of these kinds. tile_keys: see `AttentionPairs`."""
        windows = tuple(kind.window for kind in kinds)
        if not self.heads:
            return AttentionPairs.of(windows, tile_keys)
        mean = self.pair_operations
        operations = (4 * self.num_heads * kind.heads.head_dim if kind.heads else mean for kind in kinds)
        return AttentionPairs.of(windows, tile_keys, [each / mean for each in operations])

    def layer_kinds(self, layer_range: LayerRange) -> tuple[LayerKind, ...]:
        """Kinds of the layers of `layer_range`, one by one; () if all layers of the model have full attention and no state."""
        return layer_kinds(self.windows, self.states, self.heads)[layer_range.first_layer :][: layer_range.num_layers]

    def of_kind(self, kind: LayerKind) -> ModelSpec:
        """Returns a model all of whose layers have the heads of this kind."""
        if kind.heads is None:
            return self
        num_kv, head_dim, num_made = kind.heads
        return replace(self, num_kv_heads=num_kv, head_dim=head_dim, num_made=num_made, heads=())

    def head_counts(self) -> tuple[tuple[ModelSpec, int], ...]:
        """Returns models whose layers have one size of heads, and the number of layers with attention that have this size."""
        if not self.heads:
            return ((self, self.num_attending),)
        return tuple((self.of_kind(LayerKind(heads=own)), count) for own, count in self._attending_heads().items())

    def _attending_heads(self) -> Counter[HeadSizes]:
        windows = self.windows or (None,) * self.num_layers
        return Counter(own for own, window in zip(self.heads, windows, strict=True) if window != 0)

    def _head_mean(self, size: Callable[[HeadSizes], int]) -> int:
        """The mean of `size` over the heads of all layers with attention."""
        return round(sum(count * size(own) for own, count in self._attending_heads().items()) / self.num_attending)

    @property
    def largest_head_dim(self) -> int:
        """Elements of the largest head of any layer, which decides on the operators that attention may run."""
        return max(self.head_dim, self.value_head_dim, *(own.head_dim for own in self.heads))

    def kind_shares(self, layer_range: LayerRange | None = None) -> KindShares:
        """Share of the layers of `layer_range` that is of each kind; without a range, of all layers."""
        kinds = self.layer_kinds(layer_range or LayerRange(0, self.num_layers)) or (ATTENTION,)
        return tuple((kind, count / len(kinds)) for kind, count in Counter(kinds).items())

    @property
    def num_attending(self) -> int:
        """Number of layers with attention."""
        return sum(window != 0 for window in self.windows) if self.windows else self.num_layers

    def layer_windows(self, layer_range: LayerRange) -> Windows:
        """The windows of the layers of `layer_range`, one by one; () if all layers of the model see everything."""
        return self.windows[layer_range.first_layer :][: layer_range.num_layers]

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated_mlp and not self.two_matrices else 2

    @property
    def qkv_parameters(self) -> int:
        """Matrix parameters of one layer with attention that make queries, keys and values, and a gate."""
        d = self.input_size or self.hidden_size
        queries = self.query_rank * (d + self.query_size) if self.query_rank else d * self.query_size
        queries += d * self.output_size if self.gates_output else 0
        if self.heads:
            return self._head_mean(lambda own: d * own.head_dim * (self.num_heads + own.num_made * own.num_kv))
        if not self.kv_rank:
            return queries + d * self.kv_size * self.num_made // 2
        # elements of values, and of keys without their rotated part
        made = self.kv_size - self.num_kv_heads * self.rope_head_dim
        return queries + d * (self.kv_rank + self.rope_head_dim) + self.kv_rank * made

    @property
    def choice_bytes(self) -> int:
        """Bytes per token and layer of chosen keys or compressed keys, in int32."""
        return 4 * self.index.most_keys

    @property
    def latent_saved_bytes(self) -> int:
        """Bytes per token and layer that low-rank projections save besides their outputs: norms, and keys without rotation."""
        if not self.kv_rank:
            return 0
        norms = (4 + (1 + self.trains_layers) * self.bytes_per_element) * (self.query_rank + self.kv_rank) + 8
        return norms + self.bytes_per_element * self.num_heads * (self.head_dim - self.rope_head_dim)

    @property
    def layer_parameters(self) -> int:
        """Matrix parameters of a decoder layer that a token passes: q, k, v, o or a state's mixer, and the MLP or its experts.

        The mean over layers with and without attention, and with and without an index.
        """
        own_input = 3 * self.hidden_size * self.own_input_size
        attention = self.qkv_parameters + self.output_parameters + own_input + self._index_parameters
        without = 1 - self.num_attending / (self.num_layers or 1)
        mixer = attention + round(self.states.share * self.states.parameters - without * attention)
        return mixer + self.mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def output_parameters(self) -> int:
        """Matrix parameters of one layer with attention that project its output."""
        if self.output_rank:
            return self.output_rank * (self.output_size + self.output_groups * self.hidden_size)
        output = self._head_mean(lambda own: self.num_heads * own.head_dim) if self.heads else self.output_size
        return self.hidden_size * output

    @property
    def _index_parameters(self) -> int:
        """Matrix parameters of the indexes, the mean over layers: they make queries from a latent, a key and weights of heads."""
        index, d = self.index, self.hidden_size
        made = (self.query_rank or d) * index.num_heads * index.head_dim + d * (index.head_dim + index.num_heads)
        return round(made * index.num_indexes / (self.num_layers or 1))

    @property
    def layer_products(self) -> int:
        """Multiplications of one token's forward through a layer, the mean over layers: by matrices, adapters, and in scans."""
        adapters = self.adapters.layer_parameters - self.adapters.idle_parameters
        return self.layer_parameters + adapters + round(self.states.share * self.states.scan_products)

    @property
    def routed_bytes(self) -> int:
        """Bytes per token and layer that routing to experts and back saves, besides what experts save inside."""
        if not self.adapters.splits_experts:
            return self.bytes_per_element * self.routed_elements
        # neither the rows that experts read nor their outputs, but the places of rows, and a latent that experts read
        latent = self.experts.row_size if self.experts.row_size != self.hidden_size else 0
        saved = self.bytes_per_element * latent * self.experts.num_layers + _ROW_INDEX_BYTES * self.experts.token_rows
        return saved // self.num_layers

    @property
    def split_size(self) -> int:
        """Inner features of the experts of a token that run apart from their class's forward, the mean over layers."""
        return self.experts.token_rows * self.experts.inner_size // self.num_layers if self.adapters.splits_experts else 0

    @property
    def num_clamped(self) -> int:
        """Inner tensors of an expert besides those of a plain gate, since it clamps them; 0 for experts that read a latent."""
        experts = self.experts
        if not experts.token_rows or experts.row_size != self.hidden_size:
            return 0
        return (self.routed_elements * self.num_layers - experts.row_elements) // (experts.token_rows * experts.inner_size)

    @property
    def whole_size(self) -> int:
        """The part of `intermediate_size` that runs as its class says."""
        split = self.split_size * self.experts.row_size // self.hidden_size
        return max(0, self.intermediate_size - split)

    @property
    def token_products(self) -> int:
        """Multiplications of one token's forward through all layers and the output head."""
        return self.num_layers * self.layer_products + self.head_outputs * self.hidden_size

    @property
    def mixing_share(self) -> float:
        """The share of `layer_products` that comes before attention, or is the mixer of a layer with a state."""
        states, share = self.states, self.states.share
        state_products = share * (states.parameters + states.scan_products)
        return (self.num_attending / (self.num_layers or 1) * self.qkv_parameters + state_products) / self.layer_products

    @property
    def layer_weights(self) -> int:
        """Matrix parameters of one decoder layer, all of its experts included."""
        return self.layer_parameters + self.idle_parameters

    @property
    def head_outputs(self) -> int:
        """Logits of one token: entries of the vocabulary, or labels."""
        return self.num_labels or self.vocab_size

    @property
    def head_share(self) -> float:
        """The output head's share of the matrix products of one token's forward."""
        return self.head_outputs * self.hidden_size / self.token_products

    @property
    def num_parameters(self) -> int:
        """Matrix parameters of the whole model, without towers."""
        return self.part_parameters(self.num_layers, is_first=True, is_last=True)

    def has_head(self, stage: int, num_stages: int) -> bool:
        """Whether a pipeline stage has the output head."""
        return stage >= num_stages - self.num_head_stages

    def part_parameters(self, num_layers: int, is_first: bool, is_last: bool) -> int:
        """Matrix parameters of `num_layers` layers, with the embedding if `is_first` and the head if `is_last`."""
        positions = self.max_positions * self.hidden_size if self.learned_positions and is_first else 0
        positions += self.table_parameters if is_first else 0
        rows = self.vocab_size * is_first + self.head_outputs * is_last
        if self.tied_embeddings and is_first and is_last:
            rows = self.vocab_size
        return num_layers * self.layer_weights + rows * self.hidden_size + positions

    def part_weight_bytes(self, num_layers: int, is_first: bool, is_last: bool) -> int:
        """Bytes of the weights that `part_parameters` counts, without scales of packed weights."""
        count = self.part_parameters(num_layers, is_first, is_last)
        wide = num_layers * self.fp32_parameters + self.head_outputs * self.hidden_size * (self.fp32_head and is_last)
        added = max(0, 4 - self.bytes_per_element) * wide
        if self.packed.is_empty:
            return count * self.bytes_per_element + added
        return (count - num_layers * self.layer_weights) * self.bytes_per_element + num_layers * self.packed.layer_bytes + added

    def rounded_bytes(self, num_layers: int, is_last: bool) -> int:
        """Bytes by which gathered weights of `num_layers` layers, and of the head if `is_last`, are smaller than their shards."""
        experts = self.experts.parameters - self.experts.spread_parameters if self.experts.are_rounded else 0
        head = self.head_outputs * self.hidden_size if self.rounds_head and is_last else 0
        return max(0, self.bytes_per_element - 2) * (num_layers * (self.rounded_parameters + experts) + head)

    @property
    def largest_dense_matrix(self) -> int:
        """Elements of the largest matrix of a layer, without experts."""
        return self.hidden_size * max(self.intermediate_size, self.query_size)

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest weight of a layer, which all experts may share."""
        ways = 3 if self.gated_mlp else 2
        experts = self.experts.parameters * (ways - 1) // ways
        return experts or self.largest_dense_matrix

    @property
    def spread_gradients(self) -> int:
        """Parameters of a layer that are spread over ranks and have gradients; frozen ones count as spread first."""
        return max(0, self.experts.spread_parameters - self.frozen_parameters) if self.trains_layers else 0

    @property
    def trains_layers(self) -> bool:
        """Whether the layers' own weights are trained."""
        return self.adapters.is_empty

    @property
    def trains_head(self) -> bool:
        """Whether the head's weight is trained: its own, or a copy beside it."""
        return self.adapters.is_empty or self.adapters.last_parameters > 0


def _ngram_parameters(config: Mapping[str, Any], hidden_size: int) -> int:
    """Parameters of tables with an entry for each hash of some tokens in a row; up to the next prime numbers of entries."""
    width = int(config.get("ple_embed_dim") or hidden_size)
    return len(config.get("ple_layer_ids") or ()) * int(config.get("ngram_vocab_size_base") or 0) * width


def _passed_elements(config: Mapping[str, Any], hidden_size: int) -> int:
    """Elements per token that layers pass on beside one stream of hidden states."""
    traits = traits_of(config)
    if traits.streams_field:
        return (int(config[traits.streams_field]) - 1) * hidden_size
    return int(config[traits.passed_field]) if traits.passed_field else 0


def _shared_blocks(config: Mapping[str, Any], spec: ModelSpec) -> int:
    """Further matrix parameters of a layer of Zamba, the mean over layers; negative, since layers share.

    All layers with attention share one block of attention and an MLP, or several in turn. Each layer has a matrix after the
    block, and in Zamba 2 also its own adapters.
    """
    if traits_of(config).mlp != "with_attention":
        return 0
    hidden, own_mlp = spec.hidden_size, int(config["intermediate_size"])
    num_layers, rank = spec.num_attending, int(config.get("adapter_rank") or 0)
    block = spec.qkv_parameters + hidden * spec.output_size + 3 * hidden * own_mlp
    adapters = rank * (hidden + 2 * own_mlp)
    if config.get("use_shared_attention_adapter"):
        adapters += 6 * rank * spec.input_size
    num_blocks = min(num_layers, int(config.get("num_mem_blocks") or 1))
    return round(((num_blocks - num_layers) * block + num_layers * (hidden * hidden + adapters)) / spec.num_layers)
