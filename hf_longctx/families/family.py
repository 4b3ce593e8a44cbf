"""Defines the records of the registry: facts about one family of model classes. Plain data, standard library only.

A family is one folder of `transformers/models`. It has at most one causal language model, one multimodal class and one decoder,
so one record has one `Traits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MediumKind = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts of a decoder that the planner needs and `config.json` does not say. The defaults hold for Llama and most others."""

    # MLPs have a gate, or an activation that keeps as many tensors as one
    gated_mlp: bool = True
    # an MLP has two matrices, although its activation keeps as many tensors as a gate
    two_matrices: bool = False
    # policies can run MLPs alone, in token tiles
    tiles_mlps: bool = True
    # layers with an MLP: all; none, or the MLP counts as a part of the mixer; only those with attention, which all share a block
    # whose attention reads the embeddings beside hidden states; those that the list of layer types names
    mlp: Literal["in_every_layer", "in_mixer", "with_attention", "by_layer_name"] = "in_every_layer"
    # field with a number n: a layer to read images, with an MLP as wide as theirs, stands before every n-th layer
    image_layers_field: str = ""
    # field with the number of tokens after those of `vocab_size`; embedding and head have rows of their own for them
    more_tokens_field: str = ""
    # width of the MLP in hidden sizes, if the config does not give it; 0: it must
    mlp_times_hidden: int = 0
    # the MLP is this many times narrower than the config says
    mlp_divisor: int = 1
    # field with the width of the MLP in a model without experts
    dense_field: str = ""
    # every token runs through all experts; those that it did not choose get zeros
    runs_all_experts: bool = False
    # inner tensors that an expert saves because it clamps them
    expert_clamps: int = 0
    # format of the experts in the family's own checkpoints, if they are packed
    experts_in: str = ""
    # the runtime finds the norms of layers by their names, and runs them in token tiles
    tiles_norms: bool = True
    # queries and keys are normalized, unless `use_qk_norm` or `qk_layernorm` says otherwise
    qk_norms: bool = False
    # norms keep the product before their weight in fp32
    wide_norms: bool = False
    # outputs of attention and of MLPs are normalized, too
    norms_results: bool = False
    # values are normalized, too
    norms_values: bool = False
    # attention's output is multiplied by a gate
    gates_output: bool = False
    # attention may run in pieces of its heads
    cuts_heads: bool = False
    # layers without a window have heads of their own size, and some share keys and values
    global_heads: bool = False
    # layers with more KV heads than the config says: all (one for each query head), or those with a window (twice as many)
    kv_heads: Literal["", "all", "doubled_in_windows"] = ""
    # layers with a window if the config lists no layer types: none; all; those from `max_window_layers` on; those without RoPE;
    # those with RoPE, which see chunks; or those that `block_types` names
    windows: Literal["", "all", "from_max_window_layers", "without_rope", "chunks_with_rope", "blocks"] = ""
    # every n-th layer has full attention and the others have a window; 0: `windows` says it
    full_every: int = 0
    # `sliding_window` counts only if `use_sliding_window` is set
    window_switch: bool = False
    # positions are limited: a table has a row for each, or attention's bias is made for so many; or they also count from the
    # padding token
    positions: Literal["", "table", "from_padding"] = ""
    # hidden states between layers are in at least fp32, unless `residual_in_fp32` says otherwise
    wide_hidden: bool = False
    # every layer gets its own input from a table, of `hidden_size_per_layer_input` elements
    layer_inputs: bool = False
    # residuals and their addends are multiplied by weights
    scales_residuals: bool = False
    # the head is in fp32, although other weights are in half precision
    fp32_head: bool = False
    # field with the number of elements that layers pass on beside hidden states
    passed_field: str = ""
    # field with the number of streams of hidden states between layers
    streams_field: str = ""
    # number of layers: as the config says; that of its layer types; twice as many, since each calls attention twice; or without
    # those that read images, which rows of text skip
    layers: Literal["", "of_types", "doubled", "without_cross"] = ""
    # row of `STATES` in `plan/model/layers.py` for layers with a state; empty: fields of the config decide
    state: str = ""
    # functions of all layers that run as single kernels if layers are compiled: norms, gated_norms, gates, rotary
    kernels: tuple[str, ...] = ()
    # part of the model by which parameters counted from a config are off by more than 5 %; a run counts those of its model
    miscounted: str = ""
    # reason why runs keep everything: no layer is recomputed or offloaded, and no loss is computed in tiles
    keeps_all: str = ""


# traits of decoders that differ from the defaults only in the functions of all layers that have kernels
NORMS, GATES, ROTARY = (Traits(kernels=(name,)) for name in ("norms", "gates", "rotary"))
NORMS_AND_ROTARY = Traits(kernels=("norms", "rotary"))
ALL_KERNELS = Traits(kernels=("norms", "gates", "rotary"))


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """Facts by which plans run the attention of a class that writes it out itself."""

    # names of its attention class and its decoder layer class
    attention: str
    layer: str
    # attention gets a cache of ours; otherwise its method `_attn` is replaced
    takes_cache: bool = False
    # attribute by which that method divides scores; empty if it does not
    divisor: str = ""
    # attribute of the module by which that method drops weights
    dropout: str = ""
    # attention needs a mask; under plans it is a single number
    keeps_mask: bool = False


# functions of scans that packages have kernels for
SCANS_WITH_KERNELS = frozenset({"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"})


@dataclass(frozen=True, slots=True)
class Mixer:
    """Facts by which plans run a mixer with a state along the sequence: the functions of its forward that they replace."""

    # name of the mixer class
    name: str
    # functions that the mixer's forward calls, once each; `STAND_INS` has ours
    functions: tuple[str, ...] = ()
    # its name in the config's `layer_types`
    layer_type: str = "linear_attention"
    # field of the config with the number of heads that have their own state; empty if every channel has one, or if the mixer has
    # only a convolution
    heads: str = ""
    # function that may do everything at once, which plans do not use
    fused: str = ""
    # types of layers that mix no tokens, or that have attention beside a mixer
    other_types: tuple[str, ...] = ()
    # attribute of the mixer with the number of calls of the last function, if there may be several
    scans: str = ""
    # paths of methods from the mixer that its forward calls in place of functions; one that it calls twice is listed twice
    methods: tuple[str, ...] = ()
    # class of the module around a mixer that gets the plan's context and does not pass it on; empty if mixers get it
    parent: str = ""
    # the model makes a mask of tokens that are no padding if it gets none, so under plans one of all tokens
    makes_mask: bool = False
    # the model leaves its states in a cache of transformers
    fills_cache: bool = True


@dataclass(frozen=True, slots=True)
class Modules:
    """Facts of single module classes of a family, by their names, for patches and checks."""

    # experts that can be spread over ranks: their forward adds up weighted results of single experts, and every weight has one
    # entry for each expert
    experts: tuple[str, ...] = ()
    # routers that return the logits, scores and indices of a token's experts
    routers: tuple[str, ...] = ()
    # MLPs that return two values; the layer drops the second one
    mlps_of_two: tuple[str, ...] = ()
    # MLPs that get more than hidden states, by an argument with a default
    mlps_of_more: tuple[str, ...] = ()
    # decoder layers that return a tuple, hidden states first, unless their class says that it is a tensor -> its length
    tuples: Mapping[str, int] = field(default_factory=dict)
    # decoder layers that return the keys they have chosen, or got by this keyword, beside hidden states
    passed_on: Mapping[str, str] = field(default_factory=dict)
    # classes that do not pass on the context -> attributes with the modules that they call, or with lists of such modules
    hands_down: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # classes that run long rows in pieces in evaluation, with a cache; under a plan they run as in training
    in_pieces: tuple[str, ...] = ()
    # attention whose attribute `indexer` chooses keys, if it is not None
    indexed: tuple[str, ...] = ()
    # indexers that pool keys of several tokens, and return a mask of tokens
    pooling: tuple[str, ...] = ()
    # attention whose attribute `compressor` compresses keys, if it is not None
    compressing: tuple[str, ...] = ()
    # attention that only its masks limit; all layers have the config's window
    window_of_config: tuple[str, ...] = ()
    # attention that scales the queries of layers without RoPE by their position in the row
    tempered: tuple[str, ...] = ()
    # layers with a window setting that they use neither in their masks nor in an attention function
    unused_windows: tuple[str, ...] = ()
    # decoders that number the tokens of a row -> attribute with their embeddings of positions
    row_positions: Mapping[str, str] = field(default_factory=dict)
    # decoder layers -> attribute with attention to a second sequence, which rows of text do not have
    second_attention: Mapping[str, str] = field(default_factory=dict)
    # classifiers that write out the forward of transformers' generic class
    like_generic: tuple[str, ...] = ()
    # modules of towers that transformers also runs on rows of text, although their outputs are not used
    run_on_text: tuple[str, ...] = ()
    # text models that demand features of images in every row; without images they get some that no token reads
    demands_images: tuple[str, ...] = ()
    # layers -> attribute with attention to images, whose result they mask for tokens that read none
    image_attention: Mapping[str, str] = field(default_factory=dict)
    # attention of layers in which tokens of an image see each other both ways -> in which of them: all, or those with a window if
    # the config's `use_bidirectional_attention` is "vision"
    both_ways: Mapping[str, Literal["all", "vision_windows"]] = field(default_factory=dict)
    # towers inside a text model, which rows of text never run
    idle_on_text: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason why classes are refused."""

    # action of the first module that matches `layer`; without `layer`, of the class itself
    text: str
    # short form for the table of models; empty for multimodal classes, for which the table has the text
    summary: str = ""
    # regular expression for the names and classes of modules
    layer: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """One family of model classes: its names, the traits of its decoder, and facts for patches and checks."""

    # folder of `transformers/models`
    folder: str
    # causal language model that runs exactly; empty if none does
    causal: str = ""
    # values of `model_type` in configs of the family; empty: the folder's name
    types: tuple[str, ...] = ()
    traits: Traits = Traits()
    # multimodal class that runs rows of text, and the text model with which it is tested
    wrapper: str = ""
    text: str = ""
    # media that rows of the multimodal class may have, which it is tested with
    media: tuple[MediumKind, ...] = ()
    # inputs of towers without which the forward of the multimodal class refuses rows of text, too -> what stands for none:
    # zeros for every token, no features, or no images
    given_on_text: Mapping[str, Literal["zeros", "no_features", "no_images"]] = field(default_factory=dict)
    # number of the first token of a row, which the module around the text model gives it
    first_position: int = 0
    # its text model is marked as one whose tokens see later ones (is_causal=False), as only those of images and prompts do
    causal_on_text: bool = False
    # types of layers that see all earlier tokens in training, and a window after the prompt in generation
    prompt_window_types: tuple[str, ...] = ()
    # decoder that is tested, if the config may name any
    decoder: str = ""
    # class that is refused -> its reason in `REASONS`
    refused: Mapping[str, str] = field(default_factory=dict)
    modules: Modules = Modules()
    # in the order in which a layer calls them
    mixers: tuple[Mixer, ...] = ()
    own_attention: OwnAttention | None = None
    # fields with rates of dropout that only modules on hidden states apply
    dropout_fields: tuple[str, ...] = ()
    # layers drop residuals at the rate of attention weights, too, or scale outputs after the weights that they return
    drops_more_than_weights: bool = False
    # peft passes hidden states to the model, so that stages can run its adapters
    adapted_stages: bool = True
    # RoPE is scaled once more by the longest position in a forward, so that only unscaled RoPE is supported
    default_rope_only: bool = False
    # masks support attention chunks
    attention_chunks: bool = False
    # reads `image_outputs` of the text model's output, which has none: plain transformers 5.24 raises AttributeError
    reads_image_outputs: bool = False
    # its forward computes the mean loss of labels that a user has shifted; plans shift labels, as for every other class
    takes_shifted_labels: bool = False
    # without jitter, routers get no gradient
    jitter_trains_routers: bool = False

    @property
    def model_types(self) -> tuple[str, ...]:
        """Values of `model_type` in configs of the family."""
        return self.types or (self.folder,)
