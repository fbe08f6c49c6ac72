"""What both runners of transformers models share: the description of the model, block accounting, hidden states."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.protocols import Runner
from paceline.core.state_view import StateView, all_layers
from paceline.core.types import Capability, ModelInfo, Row
from paceline.errors import ModelError, OutOfMemory
from paceline.kv.block_manager import BlockManager
from paceline.layers.rope import scaled_length
from paceline.runners.last_states import LastStates
from paceline.runners.loading import eos_token_ids_of

UNLIMITED = 1 << 20  # tokens, where a config names no longest sequence
HEAD_MODULES = ("lm_head", "embed_out", "pred_layer")


class TransformersRunner(Runner):
    """A loaded transformers model. Subclasses say how its passes and its sequence caches work."""

    def __init__(self, model: PreTrainedModel, name: str, blocks: BlockManager | None = None) -> None:
        self.model = model.eval()
        self.info = model_info(model, name)
        self.blocks = blocks or BlockManager()
        self.want_hidden, self.feature_layers = False, tuple[int, ...]()
        self._last_states: LastStates | None = None
        self.capabilities = frozenset({Capability.HIDDEN_STATES})
        self.plain_only: str | None = None
        self._picks_logits = takes(model, "logits_to_keep")

    @property
    def _device(self) -> torch.device:
        return torch.device(self.info.device)

    @property
    def _wants_states(self) -> bool:
        return self.want_hidden or bool(self.feature_layers)

    def free_tokens(self) -> int:
        return self.blocks.free * self.blocks.block_size

    # --- for drafters that read the target's states -------------------------------------------------------------------

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> StateView:
        self.want_hidden = self.want_hidden or hidden
        self.feature_layers = all_layers(self.feature_layers, features)
        if self.info.num_layers in self.feature_layers and self._last_states is None:
            self._last_states = LastStates(self.model)
        return StateView(features, lambda: self.feature_layers)

    def _entering(self, states: Any, layer: int) -> Tensor:
        """States that enter a layer, of a pass that has just ended; behind the last layer those before the norm."""
        recorded = self._last_states.states if self._last_states is not None else None
        entering: Tensor = states[layer] if layer < self.info.num_layers or recorded is None else recorded
        return entering

    def hidden_view(self) -> Self:
        view = copy.copy(self)
        view.want_hidden, view.feature_layers = True, ()
        return view

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(tokens)


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether a pass has an input of this name."""
    return name in inspect.signature(model.forward).parameters


def token_inputs(model: PreTrainedModel, ids: list[int], start: int) -> dict[str, Tensor]:
    """Inputs of a pass over one sequence from token `start` on, as transformers' generation makes them."""
    device = next(model.parameters()).device
    inputs = {"input_ids": torch.tensor([ids], device=device)}
    if takes(model, "position_ids"):
        inputs["position_ids"] = torch.arange(start, start + len(ids), device=device)[None]
    return inputs


@contextmanager
def explained_memory(rows: list[Row]) -> Iterator[None]:
    """A device that runs out of memory in a pass is an OutOfMemory that names what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        tokens = sum(len(row.parents) for row in rows)
        raise OutOfMemory(f"a pass over {tokens} tokens does not fit: {_advice(rows)}") from error


@contextmanager
def explained_copy(length: int) -> Iterator[None]:
    """The same where what is stored for a prefix is copied."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"a copy of {length} cached tokens does not fit: run fewer sequences at a time") from error


def _advice(rows: list[Row]) -> str:
    if len(rows) > 1:
        return "use fewer prompts at a time or a shorter sequence"
    return "use a shorter sequence or a smaller dtype"


def model_info(model: PreTrainedModel, name: str) -> ModelInfo:
    """Raises ModelError for a model without an output vocabulary."""
    config, first = model.config.get_text_config(decoder=True), next(model.parameters())
    return ModelInfo(
        name,
        _vocab_size(model, name),
        eos_token_ids_of(model),
        context_length(config) or UNLIMITED,
        int(_first_number(config, "decoder_layers", "num_hidden_layers", "n_layer", "num_layers") or 0),
        int(_first_number(config, "hidden_size", "d_model", "n_embd") or 0),
        str(first.device),
        str(first.dtype).removeprefix("torch."),
    )


def context_length(config: Any) -> int | None:
    """Tokens that a sequence may have; None: the config of the decoder names no limit."""
    length = _first_number(config, "max_position_embeddings", "n_positions", "max_seq_len")
    return None if length is None else max(length, scaled_length(config))


def _first_number(config: Any, *names: str) -> int | None:
    """The first of these settings that the config has as a number; families name the same size differently."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _vocab_size(model: Any, name: str) -> int:
    """Rows of the head, which may be more or fewer than the tokenizer has tokens."""
    for module in (model.get_output_embeddings(), *(getattr(model, part, None) for part in HEAD_MODULES)):
        weight = getattr(module, "weight", None)
        if weight is not None:
            return int(weight.shape[0])
    size = _first_number(model.config.get_text_config(decoder=True), "vocab_size")
    if size is None:
        raise ModelError(f"{name} has no output vocabulary: it is not a language model that generates text")
    return size
