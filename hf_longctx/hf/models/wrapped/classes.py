"""Lists the multimodal classes ("wrappers") that run rows of text under plans, each with the text model it is tested with."""

from __future__ import annotations

WRAPPED_MODELS: dict[str, str] = {
    "Apertus1p5ForConditionalGeneration": "Apertus1p5TextModel",
    "AriaForConditionalGeneration": "AriaTextModel",
    "AyaVisionForConditionalGeneration": "Cohere2Model",
    "Cohere2VisionForConditionalGeneration": "Cohere2Model",
    "CohereCompassForConditionalGeneration": "CohereCompassTextModel",
    "Cosmos3EdgeForConditionalGeneration": "Cosmos3EdgeTextModel",
    "Cosmos3OmniForConditionalGeneration": "Qwen3VLTextModel",
    "DeepseekOcr2ForConditionalGeneration": "DeepseekOcr2TextModel",
    "DeepseekVLForConditionalGeneration": "LlamaModel",
    "DeepseekVLHybridForConditionalGeneration": "LlamaModel",
    "Dots3NoteForConditionalGeneration": "Dots3NoteTextModel",
    "Emu3ForConditionalGeneration": "Emu3TextModel",
    "Ernie4_5_VLMoeForConditionalGeneration": "Ernie4_5_VLMoeTextModel",
    "Exaone4_5_ForConditionalGeneration": "Exaone4Model",
    "FastVlmForConditionalGeneration": "Qwen2Model",
    "Gemma3ForConditionalGeneration": "Gemma3TextModel",
    "Gemma3nForConditionalGeneration": "Gemma3nTextModel",
    "Gemma4ForConditionalGeneration": "Gemma4TextModel",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedTextModel",
    "Glm46VForConditionalGeneration": "Glm4vTextModel",
    "Glm4vForConditionalGeneration": "Glm4vTextModel",
    "Glm4vMoeForConditionalGeneration": "Glm4vMoeTextModel",
    "GlmOcrForConditionalGeneration": "GlmOcrTextModel",
    "GotOcr2ForConditionalGeneration": "Qwen2Model",
    "Granite4VisionForConditionalGeneration": "Granite4VisionTextModel",
    "GraniteDoclingForConditionalGeneration": "GraniteDoclingTextModel",
    "HYV4VLForConditionalGeneration": "HYV4VLTextModel",
    "HunYuanVLForConditionalGeneration": "HunYuanVLTextModel",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "HyperCLOVAXModel",
    "Idefics2ForConditionalGeneration": "MistralModel",
    "Idefics3ForConditionalGeneration": "LlamaModel",
    "InternVLForConditionalGeneration": "Qwen2Model",
    "JanusForConditionalGeneration": "LlamaModel",
    "Kimi_K25ForConditionalGeneration": "DeepseekV3Model",
    "Lfm2VlForConditionalGeneration": "Lfm2Model",
    "Lfm3VlForConditionalGeneration": "Lfm3Model",
    "LightOnOcrForConditionalGeneration": "Qwen3Model",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "LlavaForConditionalGeneration": "LlamaModel",
    "LlavaNextForConditionalGeneration": "LlamaModel",
    "LlavaNextVideoForConditionalGeneration": "LlamaModel",
    "LlavaOnevisionForConditionalGeneration": "Qwen2Model",
    "MiniCPMOcrForConditionalGeneration": "Qwen3_5TextModel",
    "MiniCPMV4_6ForConditionalGeneration": "Qwen3_5TextModel",
    "MiniCPMV4_7ForConditionalGeneration": "Qwen3_5TextModel",
    "MiniMaxM3SparseForConditionalGeneration": "MiniMaxM3VLTextModel",
    "Mistral3ForConditionalGeneration": "MistralModel",
    "MossTranscribeDiarizeForConditionalGeneration": "Qwen3Model",
    "MuseGlimmerForConditionalGeneration": "MuseGlimmerTextModel",
    "MuseSparkForConditionalGeneration": "MuseSparkTextModel",
    "Ovis2ForConditionalGeneration": "Qwen2Model",
    "PaddleOCRVLForConditionalGeneration": "PaddleOCRTextModel",
    "PerceptionLMForConditionalGeneration": "LlamaModel",
    "QianfanOCRForConditionalGeneration": "Qwen3Model",
    "Qwen2VLForConditionalGeneration": "Qwen2VLTextModel",
    "Qwen2_5OmniThinkerForConditionalGeneration": "Qwen2_5OmniThinkerTextModel",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLTextModel",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "Qwen3OmniMoeThinkerTextModel",
    "Qwen3VLForConditionalGeneration": "Qwen3VLTextModel",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeTextModel",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5TextModel",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeTextModel",
    "SmolVLMForConditionalGeneration": "LlamaModel",
    "Step3p7ForConditionalGeneration": "Step3p7TextModel",
    "VideoLlama3ForConditionalGeneration": "Qwen2Model",
    "VideoLlavaForConditionalGeneration": "LlamaModel",
    "VipLlavaForConditionalGeneration": "LlamaModel",
    "VoxtralForConditionalGeneration": "LlamaModel",
}
# modules of multimodal models that transformers runs on rows of text, too, though nothing of what they give is used
RUN_ON_TEXT = ("Gemma3nMultimodalEmbedder",)

# reason why rows of text under plans cannot follow a multimodal class, and what would be needed -> classes
WRAPPED_REFUSALS: dict[str, tuple[str, ...]] = {
    "reads images, sound or another second sequence by cross attention, an encoder or learned queries, in rows of text, too; "
    "plans would have to run that part for every document": (
        *("Blip2ForConditionalGeneration", "BlipForConditionalGeneration", "EvollaForProteinText2Text"),
        *("Florence2ForConditionalGeneration", "IdeficsForVisionText2Text"),
        *("InstructBlipForConditionalGeneration", "InstructBlipVideoForConditionalGeneration", "MllamaForConditionalGeneration"),
        *("PPFormulaNetForConditionalGeneration", "Pix2StructForConditionalGeneration", "T5Gemma2ForConditionalGeneration"),
        *("UdopForConditionalGeneration", "VisionEncoderDecoderModel"),
    ),
    "names no token that stands for an image, so that plans could not tell rows with images from text; its config would have to "
    "name one": ("Kosmos2ForConditionalGeneration", "Kosmos2_5ForConditionalGeneration"),
    "has layers of type reference_sliding_attention, whose masks depend on a cache that plans do not make; plans would have to "
    "know that they see everything in training": ("UnlimitedOcrForConditionalGeneration",),
    "lets tokens of a prompt see later ones; plans would have to pass such masks to attention": (
        "PaliGemmaForConditionalGeneration",
    ),
    "is trained by another loss than that of next tokens, to denoise blocks of tokens or actions; plans would have to draw its "
    "noise": ("DiffusionGemmaForBlockDiffusion", "PI0ForConditionalGeneration"),
    "hides the logits of image tokens after the head; plans would have to do so in every tile of the loss": (
        "ChameleonForConditionalGeneration",
    ),
    "has layers with a state along the sequence that plans neither reset at a new document nor pass on; its mixers would need a "
    "convolution and a scan that plans know": (
        *("InklingForConditionalGeneration", "Inkling2ForConditionalGeneration", "Inkling2LoopForConditionalGeneration"),
        "Qwen4ExpForConditionalGeneration",
    ),
    "chooses keys by an index that plans do not know, of pooled keys or beside keys and values of earlier layers; plans would "
    "have to run that index within documents": ("Glm5NextForConditionalGeneration", "MistralLarge4ForConditionalGeneration"),
    "names no output head; transformers would have to return it by get_output_embeddings": ("NemotronH_Omni_Reasoning_V3",),
    "asks for mm_token_type_ids in training, which rows of text lack; the self-test and evaluations would have to pass zeros": (
        "Molmo2ForConditionalGeneration",
    ),
}


def wrapped_refusal(name: str) -> str:
    """Reason why plans cannot follow a multimodal class, and what would be needed; empty for other classes."""
    return next((reason for reason, names in WRAPPED_REFUSALS.items() if name in names), "")
