"""The native runner with LoRA adapters: sequences of different adapters, and of none, in one batch.

Rows without an adapter take the same passes as without this file, so their logits have the same bits. Rows with one
take an eager pass of their own, all adapters together, over the same weights and the same KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.types import DraftInput, DraftOutput, ModelOutput, Row, RowOutput
from paceline.layers.lora import LoraRows
from paceline.models.decoder import DecoderModel
from paceline.models.lora import read_adapter, with_adapters
from paceline.runners.native.eager_pass import EagerPasses
from paceline.runners.native.runner import NativeRunner


class LoraRunner(NativeRunner):
    """A NativeRunner whose sequence caches may name an adapter. `read_adapters` comes after `load` or `of_model`."""

    _lora_model: DecoderModel | None = None
    _lora_passes: EagerPasses | None = None
    _lora_rows: LoraRows | None = None

    def read_adapters(self, folders: Mapping[str, str]) -> None:
        """Read adapters by name. Raises ModelNotFound, WeightsError or CapabilityError."""
        config, dtype, device = self.model.config, self.model.embedding.dtype, self.info.device
        adapters = [
            read_adapter(name, Path(folder).expanduser(), config, dtype, device) for name, folder in folders.items()
        ]
        self._lora_rows = LoraRows()
        self._lora_model = with_adapters(self.model, adapters, self._lora_rows)
        self._make_passes()

    def _make_passes(self) -> None:
        """Also for the adapters: an early exit of this runner must exit from the adapted layers."""
        super()._make_passes()
        if self._lora_model is not None:
            self._lora_passes = EagerPasses(
                self._lora_model, self.kv, self._rope_caches, self.options, lora_rows=self._lora_rows
            )

    def _dispatch(self, rows: list[Row], last_only: bool) -> ModelOutput:
        plain = [row for row in rows if row.seq_cache.lora is None]
        if len(plain) == len(rows):
            return super()._dispatch(rows, last_only)
        assert self._lora_passes is not None
        adapted = self._lora_passes.forward([row for row in rows if row.seq_cache.lora is not None], last_only)
        if not plain:
            return adapted
        outputs = iter(adapted), iter(super()._dispatch(plain, last_only))
        merged: list[RowOutput] = [next(outputs[row.seq_cache.lora is None]) for row in rows]
        return ModelOutput.of(merged)

    @torch.inference_mode()
    def draft(self, inputs: list[DraftInput], num_tokens: int) -> DraftOutput | None:
        """Graphs know of no adapter."""
        if any(draft.seq_cache.lora is not None for draft in inputs):
            return None
        return super().draft(inputs, num_tokens)

    @torch.inference_mode()
    def decode(self, rows: list[Row], num_steps: int) -> Tensor | None:
        if any(row.seq_cache.lora is not None for row in rows):
            return None
        return super().decode(rows, num_steps)
