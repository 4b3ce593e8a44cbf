"""Lists the multimodal classes ("wrappers") that run rows of text under plans, each with the text model it is tested with."""

from __future__ import annotations

WRAPPED_MODELS: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "Gemma3TextModel",
    "Gemma4ForConditionalGeneration": "Gemma4TextModel",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedTextModel",
    "LlavaForConditionalGeneration": "LlamaModel",
    "Mistral3ForConditionalGeneration": "MistralModel",
}
