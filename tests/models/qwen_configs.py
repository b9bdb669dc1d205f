"""What config.json and its companions say in small checkpoints of Qwen3-Omni and Qwen3-VL.

The layout, and what each key means, are those of the published checkpoints; only sizes are small.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
)
NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
VOCAB_SIZE = 1024
CODEC_VOCAB, CODEC_SIZE, CODEC_EOS = 3072, 2048, 2150

VISION: dict[str, Any] = {
    "depth": 6,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 96,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 144,
    "deepstack_visual_indexes": [1, 2, 4],
}
AUDIO: dict[str, Any] = {
    "model_type": "qwen3_omni_moe_audio_encoder",
    "num_mel_bins": 128,
    "d_model": 64,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "activation_function": "gelu",
    "max_source_positions": 1500,
    "n_window": 50,
    "n_window_infer": 200,
    "conv_chunksize": 500,
    "downsample_hidden_size": 16,
    "output_dim": 64,
    "scale_embedding": False,
}
DECODER: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 65536,
    "rope_scaling": {
        "interleaved": True,
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
        "rope_type": "default",
        "type": "default",
    },
}
CODE2WAV: dict[str, Any] = {
    "model_type": "",
    "codebook_size": CODEC_SIZE,
    "codebook_dim": 24,
    "decoder_dim": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_quantizers": 4,
    "num_semantic_quantizers": 1,
    "semantic_codebook_size": 4096,
    "sliding_window": 12,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "max_position_embeddings": 8000,
    "layer_scale_initial_scale": 0.01,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "attention_bias": False,
}


def omni_config(ids: Mapping[str, int], roles: Mapping[str, int]) -> dict[str, Any]:
    """config.json of Qwen3-Omni.  ids: of the special tokens; roles: of "user" and the like."""
    media = {
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "enable_audio_output": True,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "system_token_id": roles["system"],
        "user_token_id": roles["user"],
        "assistant_token_id": roles["assistant"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "thinker_config": _thinker_config(media, roles),
        "talker_config": _talker_config(media),
        "code2wav_config": copy.deepcopy(CODE2WAV),
    }


def _thinker_config(media: Mapping[str, int], roles: Mapping[str, int]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_thinker",
        **media,
        "user_token_id": roles["user"],
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 5,
            "moe_intermediate_size": 32,
            **copy.deepcopy({**DECODER, **EXPERTS}),
        },
        "vision_config": {
            "model_type": "qwen3_omni_moe_vision_encoder",
            **copy.deepcopy(VISION),
            "spatial_patch_size": 16,
            "apply_vit_abs_pos_embed": True,
            "tokens_per_second": 2,
        },
        "audio_config": copy.deepcopy(AUDIO),
    }


def _talker_config(media: Mapping[str, int]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_talker",
        **media,
        "spatial_merge_size": 2,
        "accept_hidden_layer": 4,
        "num_code_groups": 4,
        "thinker_hidden_size": 64,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": CODEC_EOS,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
        "output_router_logits": False,
        "text_config": {
            "model_type": "qwen3_omni_moe_talker_text",
            "vocab_size": CODEC_VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            **copy.deepcopy({**DECODER, **EXPERTS}),
        },
        "code_predictor_config": {
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "vocab_size": CODEC_SIZE,
            "hidden_size": 32,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_code_groups": 4,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "rope_scaling": None,
            **copy.deepcopy(DECODER),
        },
    }


def vl_config(ids: Mapping[str, int]) -> dict[str, Any]:
    """config.json of Qwen3-VL.  ids: of the special tokens."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
        "text_config": {
            **DECODER,
            "model_type": "qwen3_vl_text",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 5,
            "rope_theta": 5000000,
            "max_position_embeddings": 262144,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
        },
        "vision_config": {"model_type": "qwen3_vl", **copy.deepcopy(VISION)},
    }


def changed(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` with values replaced.  changes: "thinker_config.vision_config.depth" -> 3."""
    result = copy.deepcopy(config)
    for path, value in changes.items():
        *folders, key = path.split(".")
        node = result
        for folder in folders:
            node = node[folder]
        node[key] = value
    return result


def picture_settings() -> dict[str, Any]:
    """preprocessor_config.json's part for pictures and frames."""
    return {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_processor_type": "Qwen2VLImageProcessor",
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
    }


def sound_settings() -> dict[str, Any]:
    """preprocessor_config.json's part for sound."""
    return {
        "chunk_length": 30,
        "dither": 0.0,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 480000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "sampling_rate": 16000,
    }
