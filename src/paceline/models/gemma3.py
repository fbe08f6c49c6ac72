"""Gemma 3: windows in five layers of six, and those have a rope of their own; norms of queries and keys.

Checkpoints that read images too (gemma3) run with their text part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.layers.attention import LayerAttention
from paceline.layers.rope import rope_config_of
from paceline.models import gemma2
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, layer_windows, unsupported_field
from paceline.models.decoder import DecoderModel

MODEL_TYPES = ("gemma3", "gemma3_text")
OWN_FIELDS = ("final_logit_softcapping", "query_pre_attn_scalar", "sliding_window")
FULL, SLIDING = "full_attention", "sliding_attention"  # the first rope, and the second
TEXT_PART = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
OTHER_PARTS = ("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector.")


class OneRope:
    """The text part of a config with the rope of one kind of layers."""

    def __init__(self, config: Any, layer_type: str) -> None:
        self._text = config.get_text_config()
        self.rope_parameters = self._text.rope_parameters[layer_type]
        self.quantization_config = getattr(config, "quantization_config", None)
        self.tie_word_embeddings = config.tie_word_embeddings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    views = [OneRope(config, layer_type) for layer_type in (FULL, SLIDING)]
    reasons = [gemma2.unsupported_gemma(views[0]), *(unsupported_field(view, OWN_FIELDS) for view in views)]
    return next((reason for reason in reasons if reason is not None), None)


def config_from_hf(config: Any) -> ArchConfig:
    full, sliding = (OneRope(config, layer_type) for layer_type in (FULL, SLIDING))
    scale = full.query_pre_attn_scalar**-0.5
    windows = zip(full.layer_types, layer_windows(full))
    kinds = [LayerAttention(scale=scale, window=window, rope=int(kind == SLIDING)) for kind, window in windows]
    made = gemma2.gemma_config(full, tuple(kinds), qk_norm=True)
    return replace(made, other_ropes=(rope_config_of(sliding, made.head_dim),))


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    return gemma2.load(checkpoint.renamed(TEXT_PART, dropped=OTHER_PARTS), config)
