"""Lists the families with refused classes only, and the reasons by their names."""

from __future__ import annotations

from hf_longctx.families.family import Family, Reason

# words in the names and classes of modules that carry a state along the sequence; Kimi Linear is the name of a model
STATE_WORDS = (
    r"Mamba|DeltaNet|DeltaAttention|(?<!Kimi)LinearAttention|LightningAttention|ShortConv|Conv1d|Recurrent(?!Gemma)|RecurrentBlock|"
    r"RgLru|xLSTMLayer|[ms]LSTM|Rwkv(?!Block|Model)|TimeMix|CCA|Mixer$"
)

# reasons to refuse a causal language model; an unknown class gets the first whose layer it has as a hint
REASONS: dict[str, Reason] = {
    "own_attention": Reason(
        "declares no attention backend: its attention is written out in its own file; plans would have to reach its queries, "
        "keys and values before the softmax, and its positions",
        "declares no attention backend",
    ),
    "state": Reason(
        "carries a state from token to token (linear attention, SSM, convolution), which plans neither reset at a new document "
        "nor pass on between ranks; they would need a record of its mixers and, where scores get biases made from queries, "
        "attention that takes these",
        "linear attention, SSM, convolution or another state along the sequence",
        STATE_WORDS,
    ),
    "cross_attention": Reason(
        "reads a second sequence (cross attention); plans would have to cut it by documents, and to leave out layers that read "
        "it alone in rows without one",
        "cross attention",
        r"encoder_attn|[cC]ross_?[aA]tt",
    ),
    "not_causal": Reason(
        "marks the attention of its decoder as one that sees later tokens (is_causal=False), as it then does in torch's own "
        "attention; the class would have to mark it as causal",
        "attention that is not marked as causal",
        r"DecoderAttention$",
    ),
    "mask_of_values": Reason(
        "makes a mask of its own from keys or values, which plans would leave out; they would have to make it for all keys of a "
        "document, over ranks and slices",
        "a mask made from the values",
        r"Attention$",
    ),
    "several_calls": Reason(
        "calls attention several times in one forward, but slices keep only one set of keys and values for each layer; plans "
        "would have to keep one for every call",
        "attention that runs several times per layer",
        r"Attention$|MLA$",
    ),
    "other_inputs": Reason(
        "reads more than token ids and positions (codebooks, images, hidden states of another model); plans would have to cut "
        "these by documents and to send them with the tokens",
        "inputs beside tokens and positions",
    ),
}
# reasons why rows of text under plans cannot follow a multimodal class, and the missing support
REASONS |= {
    "encoder_on_text": Reason(
        "reads images, sound or another second sequence by cross attention, an encoder or learned queries, in rows of text, too; "
        "plans would have to run that part for every document"
    ),
    "other_loss": Reason(
        "is trained by another loss than that of next tokens, to denoise blocks of tokens or actions; plans would have to draw "
        "its noise"
    ),
    "unknown_mixer": Reason(
        "has short convolutions in its attention, whose scores get biases by distance made from queries; plans would have to "
        "reset and pass on these convolutions, and to attend with such biases"
    ),
}

REFUSED: tuple[Family, ...] = (
    Family("big_bird", refused={"BigBirdForCausalLM": "own_attention"}),
    Family("bigbird_pegasus", refused={"BigBirdPegasusForCausalLM": "not_causal"}),
    Family("blip", refused={"BlipForConditionalGeneration": "encoder_on_text"}),
    Family("blt", refused={"BltForCausalLM": "cross_attention"}),
    Family("clvp", refused={"ClvpForCausalLM": "own_attention"}),
    Family("cpmant", refused={"CpmAntForCausalLM": "own_attention"}),
    Family("csm", refused={"CsmDepthDecoderForCausalLM": "other_inputs"}),
    Family("diffllama", refused={"DiffLlamaForCausalLM": "several_calls"}),
    Family("diffusion_gemma", refused={"DiffusionGemmaForBlockDiffusion": "other_loss"}),
    Family("doge", refused={"DogeForCausalLM": "mask_of_values"}),
    Family("dory", refused={"DoryForCausalLM": "several_calls"}),
    Family("florence2", refused={"Florence2ForConditionalGeneration": "encoder_on_text"}),
    Family("gemma4_assistant", refused={"Gemma4AssistantForCausalLM": "other_inputs"}),
    Family("gemma4_unified_assistant", refused={"Gemma4UnifiedAssistantForCausalLM": "other_inputs"}),
    Family("hrm_text", refused={"HrmTextForCausalLM": "several_calls"}),
    Family(
        "inkling",
        types=("inkling_mm_model", "inkling_text"),
        refused={"InklingForCausalLM": "state", "InklingForConditionalGeneration": "unknown_mixer"},
    ),
    Family("inkling2", refused={"Inkling2ForCausalLM": "state", "Inkling2ForConditionalGeneration": "unknown_mixer"}),
    Family(
        "inkling2_loop", refused={"Inkling2LoopForCausalLM": "state", "Inkling2LoopForConditionalGeneration": "unknown_mixer"}
    ),
    Family("musicgen", types=("musicgen_decoder",), refused={"MusicgenForCausalLM": "cross_attention"}),
    Family("musicgen_melody", refused={"MusicgenMelodyForCausalLM": "other_inputs"}),
    Family("mvp", refused={"MvpForCausalLM": "own_attention"}),
    Family("openai", types=("openai-gpt",), refused={"OpenAIGPTLMHeadModel": "own_attention"}),
    Family("pi0", refused={"PI0ForConditionalGeneration": "other_loss"}),
    Family("pix2struct", refused={"Pix2StructForConditionalGeneration": "encoder_on_text"}),
    Family("pp_formulanet", refused={"PPFormulaNetForConditionalGeneration": "encoder_on_text"}),
    Family("prophetnet", refused={"ProphetNetForCausalLM": "own_attention"}),
    Family("reformer", refused={"ReformerModelWithLMHead": "own_attention"}),
    Family("t5gemma2", refused={"T5Gemma2ForConditionalGeneration": "encoder_on_text"}),
    Family("trocr", refused={"TrOCRForCausalLM": "own_attention"}),
    Family("udop", refused={"UdopForConditionalGeneration": "encoder_on_text"}),
    Family("vision_encoder_decoder", types=("vision-encoder-decoder",), refused={"VisionEncoderDecoderModel": "encoder_on_text"}),
    Family("xglm", refused={"XGLMForCausalLM": "own_attention"}),
    Family("xlm", refused={"XLMWithLMHeadModel": "own_attention"}),
    Family("xlnet", refused={"XLNetLMHeadModel": "own_attention"}),
)
