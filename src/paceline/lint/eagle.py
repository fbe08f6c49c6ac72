"""Readings of EAGLE heads, and their drafts along a text."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.errors import PairError
from paceline.heads import eagle3
from paceline.heads.checkpoint import Checkpoint, number, plain_name
from paceline.heads.eagle import EagleHead
from paceline.heads.eagle3 import usual_feature_layers
from paceline.lint.reading import TOP, ConfigKey, Reading, config_reading, section_of, tensor_reading
from paceline.lint.registry import HeadLint
from paceline.lint.target import Anchors, StatedText, TargetFacts
from paceline.lint.transformer_readings import RotaryKeys, flipped, layer_readings, norm_readings, rotary_readings
from paceline.train.task import in_parts
from paceline.train.training_time_test import reference

LAYER_CONFIG = "transformer_layer_config"  # speculators' section for the one layer
EAGLE_CONFIG = (TOP, "eagle_config")
FEATURE_LAYERS = ConfigKey("eagle_aux_hidden_state_layer_ids", EAGLE_CONFIG)
FLAGS = {"norm_before_residual": "residual after its norm {}", "norm_output": "feed back after the norm {}"}
ATTENTION_INPUTS = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
ROWS_AT_A_TIME = 2048


def readings(checkpoint: Checkpoint, facts: TargetFacts) -> list[Reading]:
    """Every other reading of an EAGLE checkpoint."""
    kind = _eagle3 if eagle3.matches(checkpoint) else _eagle1
    return [
        *kind(checkpoint, facts),
        *rotary_readings(checkpoint, _rotary_keys(checkpoint), facts),
        *norm_readings(checkpoint),
        *_embedding_readings(checkpoint),
    ]


def _eagle3(checkpoint: Checkpoint, facts: TargetFacts) -> list[Reading]:
    usual = usual_feature_layers(facts.num_layers)
    layers = tuple(int(layer) for layer in FEATURE_LAYERS.value(checkpoint.config) or usual)
    shifts = layer_readings(checkpoint, FEATURE_LAYERS, layers, facts)
    flags = [flipped(name, ConfigKey(key, EAGLE_CONFIG), checkpoint) for key, name in FLAGS.items()]
    return [
        *shifts,
        *([config_reading("the usual layers", FEATURE_LAYERS, list(usual), checkpoint)] if layers != usual else []),
        *flags,
        *_reversed("[hidden; embedding]", "q_proj, k_proj and v_proj", ATTENTION_INPUTS),
        *_vocabulary_readings(checkpoint),
    ]


def _eagle1(checkpoint: Checkpoint, facts: TargetFacts) -> list[Reading]:
    return _reversed("[hidden; embedding]", "fc", ("fc.weight",))


def _reversed(name: str, names: str, endings: tuple[str, ...]) -> list[Reading]:
    """The two halves of the input in the other order."""
    change = f"exchange the two halves of the columns of {names}"
    return [tensor_reading(name, change, endings, lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))]


def _vocabulary_readings(checkpoint: Checkpoint) -> list[Reading]:
    """d2t may hold ids of the target instead of offsets."""
    if not any(plain_name(name) == "d2t" for name in checkpoint.tensors):
        return []
    change = "d2t holds ids of the target; store offsets instead, d2t[i] = id - i"
    return [tensor_reading("d2t as ids", change, ("d2t",), lambda ids: ids - torch.arange(ids.shape[0]))]


def _embedding_readings(checkpoint: Checkpoint) -> list[Reading]:
    """A head's own embedding may be that of another model."""
    names = [name for name in checkpoint.tensors if plain_name(name) == "embed_tokens.weight"]

    def without(files: Checkpoint) -> Checkpoint:
        return replace(files, tensors={name: value for name, value in files.tensors.items() if name not in names})

    change = "model.safetensors: leave out embed_tokens.weight, the target's own embedding fits better"
    return [Reading("the target's embedding", change, without)] if names else []


def _rotary_keys(checkpoint: Checkpoint) -> RotaryKeys:
    section = LAYER_CONFIG if section_of(checkpoint.config, LAYER_CONFIG) else TOP
    rope = f"{section}.rope_parameters" if section else "rope_parameters"
    theta, head_dim = ConfigKey("rope_theta", (section, rope)), ConfigKey("head_dim", (section,))
    config = section_of(checkpoint.config, section)
    rows = next(value.shape[0] for name, value in checkpoint.tensors.items() if name.endswith("q_proj.weight"))
    dim = int(head_dim.value(checkpoint.config, 0)) or rows // int(number(config, "num_attention_heads", 1))
    return RotaryKeys(theta, head_dim, float(theta.value(checkpoint.config, 10000.0)), dim)


def draft(head: EagleHead, text: StatedText, anchors: Anchors, k: int) -> Tensor:
    """All steps of the chain at every anchor at once, as in training."""
    teacher = text.teacher
    if head.config.target_hidden_size != teacher.hidden_size:
        sizes = f"{head.config.target_hidden_size} values; the target has {teacher.hidden_size}"
        raise PairError(f"this head reads states of {sizes}: it was trained for another model")
    head.bind_target(teacher.embed, teacher.logits)
    layers = head.feature_layers(teacher.num_layers)
    features = text.features(layers) if layers else text.final
    drafts = []
    for hidden in reference(head, features, text.tokens, k):
        rows = anchors.pick(hidden, -1)  # the row before an anchor holds the anchor's embedding
        best = torch.cat([head.logits(part).argmax(dim=-1) for part in in_parts(rows, ROWS_AT_A_TIME)])
        drafts.append(head.to_target_ids(best))
    return torch.stack(drafts, dim=-1)


LINT = HeadLint(("eagle1", "eagle3"), readings, draft)
