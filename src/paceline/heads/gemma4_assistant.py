"""Gemma 4's assistant: a small model without keys of its own, which reads those that its target has stored.

    state, logits = assistant(embedding of the last token, the target's state before it, the target's keys)

All steps of a draft are at the position of the last token; `state` is the next state. No prompt is read and nothing is
stored for a sequence. The module is transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.types import LayerKeys
from paceline.errors import WeightsError
from paceline.hub.documents import read_document

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
SLIDING = "sliding_attention"


def is_assistant(folder: Path) -> bool:
    """Whether a directory holds an assistant."""
    path = folder / "config.json"
    return path.is_file() and read_document(path, str(folder)).get("model_type") in MODEL_TYPES


@dataclass(frozen=True, slots=True, eq=False)
class SharedKeys:
    """Keys and values of a batch of sequences by kind of attention, padded at the end, with what each row sees."""

    states: dict[str, tuple[Tensor, Tensor]]  # each [sequences, heads, columns, head_dim]
    masks: dict[str, Tensor]  # bool [sequences, 1, 1, columns]


@dataclass(frozen=True, slots=True, eq=False)
class AssistantOutput:
    """What one step gives for each sequence."""

    states: Tensor  # [sequences, hidden size of the target]
    logits: Tensor  # [sequences, vocab_size]


class Gemma4Assistant:
    """An assistant that is loaded."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval().requires_grad_(False)
        self._text = model.config.get_text_config()
        self.hidden_size, self.vocab_size = int(model.config.backbone_hidden_size), int(self._text.vocab_size)

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype, device: str) -> Gemma4Assistant:
        """Read a directory. Raises WeightsError."""
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise WeightsError(f"{folder} holds no assistant that transformers can load: {reason}") from error
        return cls(model.to(device))

    def shared(self, keys: list[Mapping[str, LayerKeys]]) -> SharedKeys:
        """The keys of these sequences side by side; of windows the last ones, as many as transformers shows it."""
        lengths = torch.tensor([next(iter(each.values())).keys.shape[1] for each in keys])
        columns = torch.arange(int(lengths.max()))
        states, masks = {}, {}
        for kind in keys[0]:
            stored = [each[kind] for each in keys]
            states[kind] = (_padded([part.keys for part in stored]), _padded([part.values for part in stored]))
            reach = self._text.sliding_window if kind == SLIDING else columns.shape[0]
            seen = (columns < lengths[:, None]) & (columns >= lengths[:, None] - 1 - reach)
            masks[kind] = seen[:, None, None].to(states[kind][0].device)
        return SharedKeys(states, masks)

    @torch.inference_mode()
    def step(self, embeddings: Tensor, states: Tensor, positions: Tensor, shared: SharedKeys) -> AssistantOutput:
        """embeddings: of the last token; states: before it. Both [sequences, hidden size]; positions [sequences]."""
        model, dtype = self._model, self._model.pre_projection.weight.dtype
        mixed = model.pre_projection(torch.cat([embeddings, states], dim=-1).to(dtype))[:, None]
        out = model.model(
            inputs_embeds=mixed,
            attention_mask=shared.masks,
            position_ids=positions[:, None],
            shared_kv_states=dict(shared.states),
            use_cache=False,
        ).last_hidden_state
        ordered = model.config.use_ordered_embeddings
        logits = model.masked_embedding(out, model.lm_head.weight) if ordered else model.lm_head(out)
        return AssistantOutput(model.post_projection(out)[:, 0], logits[:, 0])


def _padded(parts: list[Tensor]) -> Tensor:
    """[heads, columns, head_dim] each -> [sequences, heads, most columns, head_dim]"""
    if len(parts) == 1:
        return parts[0][None]
    columns = [part.transpose(0, 1) for part in parts]
    return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True).transpose(1, 2)
