"""Lists the model classes that run under plans, and says why other classes do not.

Start-up checks read this list, and a sweep of tests over all classes proves it. A class is listed as tested if tiny models of
it, with every kind of layer that its default config has, give the same loss and gradients as plain Hugging Face: packed, in
slices, recomputed, in stages, on sequence groups, on rings and sharded. A tested class may also refuse some of these, with an
error that names them.
`docs/models.md` lists the error that was measured for each class.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_longctx.hf.models.heads import head_kind, is_generic
from hf_longctx.hf.models.patch import is_of_transformers
from hf_longctx.hf.models.states import STATE_WORDS
from hf_longctx.hf.models.towers import text_class, text_part
from hf_longctx.hf.models.wrapped.classes import WRAPPED_MODELS, wrapped_refusal

TESTED_MODELS: tuple[str, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "AXK1ForCausalLM",
    "AXK2ForCausalLM",
    "AfmoeForCausalLM",
    "Apertus1p5TextForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "AriaTextForCausalLM",
    "BailingHybridForCausalLM",
    "BambaForCausalLM",
    "BeamForCausalLM",
    "BertGenerationDecoder",
    "BertLMHeadModel",
    "BioGptForCausalLM",
    "BitNetForCausalLM",
    "BloomForCausalLM",
    "CamembertForCausalLM",
    "CodeGenForCausalLM",
    "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM",
    "CohereCompassForCausalLM",
    "CohereForCausalLM",
    "CwmForCausalLM",
    "Data2VecTextForCausalLM",
    "DbrxForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Dots1ForCausalLM",
    "Dots3NoteForCausalLM",
    "ElectraForCausalLM",
    "Emu3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "ErnieForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM",
    "FalconForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "FlexOlmoForCausalLM",
    "FlintForCausalLM",
    "FuyuForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "GPTNeoXJapaneseForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmForCausalLM",
    "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "GraniteSWAForCausalLM",
    "HYV3ForCausalLM",
    "HYV4ForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM",
    "Jais2ForCausalLM",
    "JambaForCausalLM",
    "JetMoeForCausalLM",
    "KimiLinearForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "LaraMiniForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Lfm3ForCausalLM",
    "Llama4ForCausalLM",
    "LongcatFlashForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MegatronBertForCausalLM",
    "MellumForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniCPM3ForCausalLM",
    "MiniMaxForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "Ministral3ForCausalLM",
    "MinistralForCausalLM",
    "Mistral4ForCausalLM",
    "MixtralForCausalLM",
    "ModernBertDecoderForCausalLM",
    "MoshiForCausalLM",
    "MptForCausalLM",
    "NanoChatForCausalLM",
    "NemotronForCausalLM",
    "NemotronHForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoForCausalLM",
    "OlmoHybridForCausalLM",
    "OlmoeForCausalLM",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "Phi4MultimodalForCausalLM",
    "PhiForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "RecurrentGemmaForCausalLM",
    "RemBertForCausalLM",
    "RoCBertForCausalLM",
    "RoFormerForCausalLM",
    "RobertaForCausalLM",
    "RobertaPreLayerNormForCausalLM",
    "RwkvForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM",
    "XLMRobertaForCausalLM",
    "XLMRobertaXLForCausalLM",
    "XmodForCausalLM",
    "YoutuForCausalLM",
    "Zamba2ForCausalLM",
    "ZambaForCausalLM",
    "ZayaForCausalLM",
    "xLSTMForCausalLM",
)


@dataclass(frozen=True)
class Refusal:
    """Why some classes are refused.

    text: what the first module that matches `layer` does; without `layer`, what the class itself does. layer: regular expression
    for the names and classes of modules.
    """

    summary: str
    text: str
    classes: tuple[str, ...]
    layer: str = ""


REFUSALS = (
    Refusal(
        "declares no attention backend",
        "declares no attention backend: its attention is written out in its own file",
        (
            "BigBirdForCausalLM",
            "CTRLLMHeadModel",
            "ClvpForCausalLM",
            "CpmAntForCausalLM",
            "MvpForCausalLM",
            "OpenAIGPTLMHeadModel",
            "ProphetNetForCausalLM",
            "ReformerModelWithLMHead",
            "TrOCRForCausalLM",
            "XGLMForCausalLM",
            "XLMWithLMHeadModel",
            "XLNetLMHeadModel",
        ),
    ),
    Refusal(
        "linear attention, SSM, convolution or another state along the sequence",
        "carries a state from token to token (linear attention, SSM, convolution), which plans neither reset at a new document "
        "nor pass on between ranks",
        (
            "InklingForCausalLM",
            "Inkling2ForCausalLM",
            "Inkling2LoopForCausalLM",
            "Qwen4ExpForCausalLM",
        ),
        STATE_WORDS,
    ),
    Refusal(
        "cross attention",
        "reads a second sequence (cross attention), and the class takes no positions that restart at each document",
        (
            "BartForCausalLM",
            "BigBirdPegasusForCausalLM",
            "BlenderbotForCausalLM",
            "BlenderbotSmallForCausalLM",
            "BltForCausalLM",
            "MBartForCausalLM",
            "MarianForCausalLM",
            "MllamaForCausalLM",
            "MusicgenForCausalLM",
            "PLBartForCausalLM",
            "PegasusForCausalLM",
            "WhisperForCausalLM",
        ),
        r"encoder_attn|[cC]ross_?[aA]tt",
    ),
    Refusal(
        "compressed keys",
        "compresses the keys of several tokens into one and lets an index choose among these; plans would have to start every "
        "compression anew at a new document, and to pass compressed keys on between ranks and slices",
        ("DeepseekV4ForCausalLM",),
        r"[cC]ompress",
    ),
    Refusal(
        "a mask made from the values",
        "makes a mask of its own from keys or values, which plans would leave out",
        ("DogeForCausalLM",),
        r"Attention$",
    ),
    Refusal(
        "attention that runs several times per layer",
        "calls attention several times in one forward, but slices keep only one set of keys and values for each layer",
        (
            "DiffLlamaForCausalLM",
            "DoryForCausalLM",
            "HrmTextForCausalLM",
        ),
        r"Attention$|MLA$",
    ),
    Refusal(
        "inputs beside tokens and positions",
        "reads more than token ids and positions (codebooks, images, hidden states of another model)",
        (
            "CsmDepthDecoderForCausalLM",
            "Gemma4AssistantForCausalLM",
            "Gemma4UnifiedAssistantForCausalLM",
            "GitForCausalLM",
            "MusicgenMelodyForCausalLM",
        ),
    ),
)
# classes supported only with unscaled RoPE: they scale RoPE once more by the longest position in a forward
DEFAULT_ROPE_ONLY = ("PhimoeForCausalLM",)
# class whose config may name any decoder -> the decoder that is tested
_DECODERS = {"FuyuForCausalLM": "PersimmonModel"}
_REMEDY = "use a class that docs/models.md calls exact, such as LlamaForCausalLM, MistralForCausalLM or Qwen3ForCausalLM"


def class_problem(model: nn.Module) -> str:
    """Why models of this class cannot run under plans, naming the class and the layer; empty for a tested class.

    A class that adds no code to a tested one, such as that of a repository with its own config, counts as that.
    """
    name = code_of(type(model)).__name__
    if name in TESTED_MODELS:
        return _decoder_problem(model)
    if name in WRAPPED_MODELS:
        return _text_problem(model)
    if reason := wrapped_refusal(name):
        return f"model class {name} is not supported: it {reason}. Instead, {_REMEDY}"
    if head_kind(model) != "next_token":
        return _classifier_problem(model)
    refusal = refusal_of(name)
    if refusal is None:
        hint = next((found for found in map(lambda each: layer_of(model, each), REFUSALS) if found), "")
        return (
            f"model class {name} is not in the tested list, so plans might give silently wrong results with "
            f"it{f' ({hint})' if hint else ''}; {_REMEDY}"
        )
    layer = layer_of(model, refusal)
    return f"model class {name} is not supported: {f'{layer} ' if layer else 'it '}{refusal.text}; {_REMEDY}"


def code_of(cls: type) -> type:
    """The class whose code an instance of `cls` runs: `cls`, or the class of transformers that it inherits all functions from."""
    kinds, found = (FunctionType, classmethod, staticmethod, property), cls
    while found.__module__.split(".")[0] != "transformers":
        if len(found.__bases__) != 1 or any(isinstance(value, kinds) for value in vars(found).values()):
            return cls
        (found,) = found.__bases__
    return found


def _decoder_problem(model: nn.Module) -> str:
    """Why a model of a tested class cannot run because its config names an untested decoder; empty if the decoder is tested."""
    tested = _DECODERS.get(code_of(type(model)).__name__, "")
    inner = [(path, type(module).__name__) for path, module in model.named_modules() if hasattr(module, "embed_tokens")]
    wrong = [f"{path} ({name})" for path, name in inner if tested and name != tested]
    return (
        f"model class {type(model).__name__} has {wrong[0]} inside, but is tested only with {tested}; use {tested}"
        if wrong
        else ""
    )


def _text_problem(model: nn.Module) -> str:
    """Why a multimodal model cannot train rows of text because its text model is untested; empty if that is tested."""
    name, text = code_of(type(model)).__name__, type(text_part(model)).__name__.removeprefix("FSDP")
    if text == WRAPPED_MODELS[name] or text_class(model) in TESTED_MODELS:
        return ""
    problem = f"model class {name} has the text model {text} inside, but is tested only with {WRAPPED_MODELS[name]}"
    return f"{problem} and the text models of exact classes; {_REMEDY}"


def _classifier_problem(model: nn.Module) -> str:
    """Why a model that classifies documents or tokens cannot run; empty if its text model is that of a tested class."""
    name, remedy = type(model).__name__, "use a class whose causal language model docs/models.md calls exact"
    if not is_generic(model):
        return (
            f"model class {name} is not supported: its head is not known to be one linear module on the text model; {remedy}, "
            f"such as LlamaForSequenceClassification or Qwen3ForTokenClassification"
        )
    if not is_of_transformers(type(model)):
        return (
            f"model class {name} is not supported: it has a forward of its own, which plans would leave out; load the class of "
            f"transformers on which it is built, and pass another loss of a token or a document as token_loss"
        )
    config: Any = model.config
    if config.get_text_config() is not config:
        return (
            f"model class {name} is not supported: it has towers for images or sound around its text model, which is not tested "
            f"with a classifier; use the class of the text model alone"
        )
    causal = text_class(model)
    if causal in TESTED_MODELS:
        return ""
    refusal = refusal_of(causal)
    if refusal is None:
        return f"model class {name} is not in the tested list, since its text model ({causal}) is not; {remedy}"
    layer = layer_of(model, refusal)
    return f"model class {name} is not supported: {f'{layer} ' if layer else 'it '}{refusal.text}; {remedy}"


def refusal_of(name: str) -> Refusal | None:
    """Why the class of this name is refused; None for tested and for unknown classes."""
    return next((refusal for refusal in REFUSALS if name in refusal.classes), None)


def layer_of(model: nn.Module, refusal: Refusal) -> str:
    """Name and class of the first module that matches the refusal; empty if there is none."""
    if not refusal.layer:
        return ""
    found = (
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if not isinstance(module, PreTrainedModel)
        and re.search(refusal.layer, f"{name.rsplit('.', 1)[-1]} {type(module).__name__}")
    )
    return next(found, "")
