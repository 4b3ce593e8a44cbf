"""Settings of multimodal classes in tiny models: sizes of their towers, which rows of text never run, and ids of their tokens."""

from __future__ import annotations

from typing import Any

# sizes of towers for images and sound, which need not fit together
TOWER: dict[str, Any] = {
    **dict.fromkeys(("embed_dim", "out_hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
    **dict.fromkeys(("projection_dim", "lm_hidden_size", "encoder_hidden_size", "output_dim", "encoder_attention_heads"), 32),
    **{"depth": 2, "num_heads": 4, "image_size": 56, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
}
_SIGLIP = {
    **{"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "image_size": 28, "patch_size": 14},
}
_ENCODER = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"image_size": 64, "patch_size": 16},
}
_SAM = {
    **{"hidden_size": 32, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 64},
    **{"patch_size": 16, "window_size": 2, "mlp_dim": 32, "global_attn_indexes": [0], "downsample_channels": [8, 32]},
}
# rows have no padding token
_KOSMOS = {"embed_dim": 32, "layers": 2, "attention_heads": 4, "ffn_dim": 48, "vocab_size": 65, "pad_token_id": 64}
_OPT = {"text_config": {"do_layer_norm_before": True}, "num_query_tokens": 3}
# name of a multimodal class -> settings of its config and of the parts of its config
OF_WRAPPER: dict[str, dict[str, Any]] = {
    "Apertus1p5ForConditionalGeneration": {
        "vision_config": {"base_channels": 32, "embed_dim": 8, "latent_channels": 8, "codebook_size": 8, "num_res_blocks": 1},
        "audio_config": {"hidden_size": 32, "codebook_dim": 32, "num_filters": 2, "codebook_size": 8},
        **{"image_token_id": 62, "audio_token_id": 63, "image_token_offset": 42, "audio_token_offset": 50},
    },
    "Blip2ForConditionalGeneration": _OPT | {"image_token_index": 64},
    # tokens from 64 on belong to images
    "ChameleonForConditionalGeneration": {
        **{"vocabulary_map": {"<image>": 64, "IMGIMGAZ": 65, "IMGIMGBZ": 66}, "vocab_size": 67, "hidden_size": 32},
        **{"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        "vq_config": {"base_channels": 32, "latent_channels": 32, "embed_dim": 32, "num_embeddings": 8},
    },
    "Cohere2VisionForConditionalGeneration": {"alignment_intermediate_size": 32},
    "DeepseekOcr2ForConditionalGeneration": {
        "vision_config": {
            "sam_config": _SAM,
            "encoder_config": {**_ENCODER, "num_key_value_heads": 4, "layer_types": ["full_attention"]},
        },
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    },
    "DeepseekVLHybridForConditionalGeneration": {
        "high_res_vision_config": {"hidden_size": 32, "output_channels": 8, "num_hidden_layers": 1, "image_size": 64},
    },
    "Dots3NoteForConditionalGeneration": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {"<image>": 63, "<|visual token 000000|>": 62},
        "vq_config": {"base_channels": 32, "hidden_size": 32, "codebook_size": 8},
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {
            **{"moe_intermediate_size": [16, 8], "mlp_layer_types": ["dense", "sparse"]},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
    },
    "EvollaForProteinText2Text": {
        "protein_encoder_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
        **{"aligner_num_add_layers": 1, "resampler_depth": 1, "resampler_dim_head": 8, "resampler_heads": 2},
        "resampler_num_latents": 4,
    },
    # the towers that these classes name by default need timm
    "FastVlmForConditionalGeneration": {"vision_config": _SIGLIP},
    # tokens from 64 on belong to images, from 68 on to sound
    "Gemma3nForConditionalGeneration": {
        "text_config": {"vocab_size": 72},
        "vision_config": _SIGLIP | {"vocab_offset": 64, "vocab_size": 4, "rms_norm_eps": 1e-6},
        "audio_config": {"vocab_offset": 68, "vocab_size": 4},
        **{"image_token_id": 65, "audio_token_id": 69},
    },
    "Glm5NextForConditionalGeneration": {
        "text_config": {
            **{"num_hidden_layers": 4, "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2, "index_kpool": 4},
            **{"layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"]},
            **{"indexer_types": ["full", "full", "shared", "full"], "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
            **{"index_topk": 8, "num_key_value_heads": 4, "qk_rope_head_dim": 0, "qk_nope_head_dim": 8, "head_dim": 0},
        },
    },
    "Granite4VisionForConditionalGeneration": {
        **{"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "1/2"},
        "vision_config": {"hidden_size": 64, "num_attention_heads": 4, "image_size": 56, "patch_size": 14},
        "qformer_config": {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 1},
    },
    "HYV4VLForConditionalGeneration": {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]}}},
    # a layer to read images before every second layer, with gates of vectors, and tokens in a table of their own
    "IdeficsForVisionText2Text": {
        **{"num_hidden_layers": 4, "cross_layer_interval": 2, "use_resampler": True, "qk_layer_norms": True},
        **{"alpha_type": "vector", "freeze_text_layers": False, "freeze_vision_layers": False},
        **{"vocab_size": 62, "additional_vocab_size": 2},
        "vision_config": {
            **{"embed_dim": 32, "image_size": 28, "patch_size": 14, "intermediate_size": 48, "num_hidden_layers": 1},
            "num_attention_heads": 4,
        },
        "perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8},
    },
    "InstructBlipForConditionalGeneration": _OPT | {"image_token_index": 64},
    "InstructBlipVideoForConditionalGeneration": _OPT | {"video_token_index": 64, "image_token_index": 65},
    "JanusForConditionalGeneration": {
        "vq_config": {"base_channels": 32, "latent_channels": 32, "image_token_embed_dim": 32, "num_embeddings": 8},
    },
    "Kosmos2ForConditionalGeneration": {"text_config": _KOSMOS, "latent_query_num": 4},
    "Kosmos2_5ForConditionalGeneration": {"text_config": _KOSMOS, "latent_query_num": 4},
    # keys and values of earlier layers with and without rotary embeddings, made twice, and choices of earlier layers
    "MistralLarge4ForConditionalGeneration": {
        "text_config": {
            **{"num_hidden_layers": 6, "layer_types": ["indexed_attention"] * 6, "mlp_layer_types": ["dense", *["sparse"] * 5]},
            **{"kv_source_layers": [0, 1, 0, 1, 4, 4], "no_rope_layers": [1, 0, 1, 0, 1, 1], "num_key_value_heads": 4},
            "indexer_types": ["full", "full", "shared", "full", "full", "shared"],
        },
    },
    "Molmo2ForConditionalGeneration": {
        "vision_config": {"image_size": [56, 56]},
        "adapter_config": {"vision_feature_layer": [0, 1], "text_hidden_size": 32},
    },
    "MuseGlimmerForConditionalGeneration": {"out_hidden_size": 32, "projector_hidden_size": 32},
    "MuseSparkForConditionalGeneration": {
        "audio_config": {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_hidden_layers": 4, "out_hidden_size": 32},
        "text_config": {"moe_hidden_size": 32},
        **{"out_hidden_size": 32, "projector_hidden_size": 32},
    },
    "NemotronH_Omni_Reasoning_V3": {
        "vision_config": {"video_temporal_patch_size": 2},
        **{"projector_hidden_size": 32, "vision_hidden_size": 32, "image_token_id": 61, "video_token_id": 62},
    },
    "PaddleOCRVLForConditionalGeneration": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    },
    "PaliGemmaForConditionalGeneration": {"vision_config": _SIGLIP | {"projection_dim": 32}, "image_token_index": 64},
    "PerceptionLMForConditionalGeneration": {"vision_config": _SIGLIP | {"model_args": {"embed_dim": 32}}},
    "UnlimitedOcrForConditionalGeneration": {
        "vision_config": {"sam_config": _SAM, "encoder_config": _ENCODER},
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "num_key_value_heads": 4},
    },
}
