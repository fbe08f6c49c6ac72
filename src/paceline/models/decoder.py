"""A decoder-only model: embedding, layers, final norm, LM head. Architectures fill it with their own layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from paceline.errors import CapabilityError
from paceline.layers.decoder_layer import LayerWeights
from paceline.layers.gemm_types import Linear
from paceline.layers.norm import Norm
from paceline.layers.ops import Ops
from paceline.models.checkpoint import Embedding
from paceline.models.config import ArchConfig

if TYPE_CHECKING:
    from paceline.layers.gemm_types import GemmOutput
    from paceline.layers.linear_triton import ArgmaxResult
    from paceline.layers.triton_ops import TritonOps


class Layer(Protocol):
    """One layer of a model."""

    def __call__(self, hidden_states: Tensor, index: int, ops: Ops, batch: Any) -> Tensor:
        """hidden_states [nodes, hidden_size] through layer number `index`."""

    def linears(self) -> Iterator[Linear]:
        """Every linear layer of it."""

    def with_linears(self, wrap: Callable[[str, Linear], Linear]) -> Layer:
        """The same layer with each linear layer wrapped, by its name in models/lora.py. Raises CapabilityError."""
        raise CapabilityError("LoRA adapters are for models with the layers of Llama; this one has others")

    @property
    def can_fuse(self) -> bool:
        """Whether the Triton operations have everything it asks for; False: it runs through the eager ones."""
        return True

    @property
    def can_capture(self) -> bool:
        """Whether a graph can hold its eager operations: they ask the device for nothing."""
        return True

    def weights(self) -> LayerWeights | None:
        """Its tensors, where it is wired like layers/decoder_layer.py; None: another kind of layer."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class LayerOutput:
    """Hidden states behind the last layer that ran, and those that entered the feature layers."""

    hidden_states: Tensor  # [nodes, hidden_size], before the final norm
    features: Tensor | None  # [nodes, layers · hidden_size]


@dataclass(frozen=True, slots=True, eq=False)
class DecoderModel:
    """Weights of a whole model, and its wiring.

    scale_embedding  what happens to a row of the embedding before the first layer; None: nothing
    scale_logits     what happens to the logits, without changing their order; None: nothing
    """

    config: ArchConfig
    embedding: Embedding  # [vocab_size, hidden_size]
    layers: Sequence[Layer]
    final_norm: Norm
    lm_head: Linear
    lm_head_bias: Tensor | None = None
    scale_embedding: Callable[[Tensor], Tensor] | None = None
    scale_logits: Callable[[Tensor], Tensor] | None = None

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens -> input vectors."""
        rows = self.embedding[tokens]
        return rows if self.scale_embedding is None else self.scale_embedding(rows)

    @property
    def embedding_matrix(self) -> Tensor | None:
        """The embedding, where it is one matrix in floating point."""
        return self.embedding if isinstance(self.embedding, Tensor) else None

    def run_layers(
        self,
        hidden_states: Tensor,
        batch: Any,
        ops: Ops,
        features: tuple[int, ...] = (),
        *,
        first: int = 0,
        last: int | None = None,
    ) -> LayerOutput:
        """All layers, or those from `first` up to but not including `last`, over hidden_states [nodes, hidden_size]."""
        kept: list[Tensor] = []
        end = len(self.layers) if last is None else last
        for index in range(first, end):
            if index in features:
                kept.append(hidden_states.clone())
            hidden_states = self.layers[index](hidden_states, index, ops, batch)
        if end in features:
            kept.append(hidden_states.clone())
        return LayerOutput(hidden_states, torch.cat(kept, dim=-1) if kept else None)

    def norm(self, hidden_states: Tensor, ops: Ops) -> Tensor:
        """The final norm."""
        return ops.norm(hidden_states, self.final_norm)

    def logits(self, hidden: Tensor, vocab_rows: int = 0) -> Tensor:
        """Hidden states behind the final norm -> logits. vocab_rows: of the first so many tokens alone, where the LM
        head can be read so; 0: of all."""
        part = self.lm_head.first_rows(vocab_rows) if vocab_rows else None
        if part is None:
            logits = self.lm_head(hidden, self.lm_head_bias)
        else:
            logits = part(hidden, None if self.lm_head_bias is None else self.lm_head_bias[:vocab_rows])
        return logits if self.scale_logits is None else self.scale_logits(logits)

    def fused_logits(self, hidden_states: Tensor, ops: TritonOps) -> GemmOutput:
        """Final norm and LM head in one product, with the argmax of each row."""
        output = ops.logits(hidden_states, self.final_norm, self.lm_head, self.lm_head_bias)
        return output if self.scale_logits is None else replace(output, out=self.scale_logits(output.out))

    def argmax_embedded(self, logits: GemmOutput, ops: TritonOps) -> ArgmaxResult:
        """The best token of each row and its input vector, in one launch where the embedding is used as it is."""
        return ops.argmax(logits, self.embedding_matrix if self.scale_embedding is None else None)

    def linears(self) -> Iterator[Linear]:
        """Every linear layer that a pass reads."""
        for layer in self.layers:
            yield from layer.linears()
        yield self.lm_head

    @property
    def quantizes_input(self) -> bool:
        """Whether any product rounds its input to fewer bits."""
        return any(linear.quantizes_input for linear in self.linears())
