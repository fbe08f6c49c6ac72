"""States of a transformers model after its last layer and before its final norm: its outputs hold those after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def final_norm(model: Any) -> nn.Module | None:
    """The last norm outside the layers; None where a model has none that can be seen."""
    norms = [child for name, child in model.base_model.named_children() if "norm" in name or name == "ln_f"]
    return norms[-1] if norms else None


class LastStates:
    """Holds what entered the final norm in the last pass. states: None where the model has no such norm."""

    def __init__(self, model: Any) -> None:
        self.states: Tensor | None = None
        norm = final_norm(model)
        self._handle = None if norm is None else norm.register_forward_pre_hook(self._record)

    def _record(self, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.states = arguments[0]

    def close(self) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.remove()
