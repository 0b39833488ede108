"""Tiny models that are no causal language models: an encoder, a vision model, an encoder-decoder, a multimodal one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
IMAGE = {"image_size": 16, "patch_size": 8}
IMAGE_TOKEN, PATCHES = 90, 4
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert() -> hf.PreTrainedModel:
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=96, **SIZES, **NO_DROPOUT))


def _vit() -> hf.PreTrainedModel:
    return hf.ViTForImageClassification(hf.ViTConfig(**IMAGE, num_labels=5, **SIZES, **NO_DROPOUT))


def _whisper() -> hf.PreTrainedModel:
    width = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    tokens = {"vocab_size": 96, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, "decoder_start_token_id": 2}
    audio = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16}
    config = hf.WhisperConfig(**width, **layers, **tokens, **audio, dropout=0.0, begin_suppress_tokens=None)
    return hf.WhisperForConditionalGeneration(config)


def _llava() -> hf.PreTrainedModel:
    vision = hf.CLIPVisionConfig(**SIZES, **IMAGE, projection_dim=32)
    text = hf.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=96)
    config = hf.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, image_seq_length=PATCHES
    )
    return hf.LlavaForConditionalGeneration(config)


def _ids(generator: torch.Generator, length: int) -> Tensor:
    return torch.randint(5, IMAGE_TOKEN, (2, length), generator=generator)


def _tokens(generator: torch.Generator) -> dict[str, Tensor]:
    ids = _ids(generator, 11)
    return {"input_ids": ids, "labels": ids.clone()}


def _pixels(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(0, 5, (2,), generator=generator)
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": labels}


def _audio(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 24, generator=generator), "labels": _ids(generator, 9)}


def _image_and_text(generator: torch.Generator) -> dict[str, Tensor]:
    ids = _ids(generator, 11)
    ids[:, 2 : 2 + PATCHES] = IMAGE_TOKEN
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids.clone()}


MODELS: dict[str, tuple[Callable[[], hf.PreTrainedModel], Callable[[torch.Generator], dict[str, Tensor]]]] = {
    "bert": (_bert, _tokens),
    "vit": (_vit, _pixels),
    "whisper": (_whisper, _audio),
    "llava": (_llava, _image_and_text),
}
"""How each is made, and a batch for it."""


def build(name: str) -> hf.PreTrainedModel:
    """The same model at every call."""
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def batch(name: str, data_rank: int) -> dict[str, Tensor]:
    """The arguments of one data rank's call."""
    return MODELS[name][1](torch.Generator().manual_seed(data_rank))
