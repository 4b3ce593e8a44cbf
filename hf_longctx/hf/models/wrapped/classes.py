"""Lists the multimodal classes ("wrappers") that run rows of text under plans, each with the text model it is tested with."""

from __future__ import annotations

WRAPPED_MODELS: dict[str, str] = {
    "AyaVisionForConditionalGeneration": "Cohere2Model",
    "Cohere2VisionForConditionalGeneration": "Cohere2Model",
    "Gemma3ForConditionalGeneration": "Gemma3TextModel",
    "Gemma4ForConditionalGeneration": "Gemma4TextModel",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedTextModel",
    "Glm4vForConditionalGeneration": "Glm4vTextModel",
    "Idefics3ForConditionalGeneration": "LlamaModel",
    "InternVLForConditionalGeneration": "Qwen2Model",
    "LlavaForConditionalGeneration": "LlamaModel",
    "LlavaNextForConditionalGeneration": "LlamaModel",
    "LlavaNextVideoForConditionalGeneration": "LlamaModel",
    "LlavaOnevisionForConditionalGeneration": "Qwen2Model",
    "Mistral3ForConditionalGeneration": "MistralModel",
    "Qwen2VLForConditionalGeneration": "Qwen2VLTextModel",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLTextModel",
    "Qwen3VLForConditionalGeneration": "Qwen3VLTextModel",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeTextModel",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5TextModel",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeTextModel",
    "SmolVLMForConditionalGeneration": "LlamaModel",
}
