"""Metadata of a GGUF file, read so that nothing is overlooked.

A key that no one reads must be on a list of keys known not to change the model; any other is an error by its name.
A file that is half understood makes a model that runs and is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import WeightsError

if TYPE_CHECKING:
    from gguf import GGUFReader

# Descriptions of the file and of how it was made.
HARMLESS_PREFIXES = ("GGUF.", "general.", "quantize.", "mradermacher.", "tokenizer.chat_template.")
HARMLESS = {
    "split.no",
    "split.tensors.count",
    "tokenizer.chat_templates",
    "tokenizer.huggingface.json",
}
HARMLESS_OF_ARCHITECTURE = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
# What the tokenizer is built from, and tokens that are in its vocabulary anyway.
TOKEN_IDS = (
    "bos eos eot eom unknown seperator padding cls mask prefix suffix middle "
    "fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep"
)
TOKENIZER_KEYS = {"tokenizer.chat_template", "tokenizer.ggml.add_sep_token"}
TOKENIZER_KEYS |= {f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "token_type_count")}
TOKENIZER_KEYS |= {"tokenizer.ggml.scores", "tokenizer.ggml.merges"}
TOKENIZER_KEYS |= {f"tokenizer.ggml.{name}_token_id" for name in TOKEN_IDS.split()}
# Keys that change the computation in some model, with the values that leave it as it is.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (1,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "pooling_type": (0,),
    "residual_scale": (1,),
    "rope.scaling.alpha": (0,),
    "use_parallel_residual": (False,),
}


class GgufFields:
    """Metadata by key. Remembers what was read, so that the rest can be refused."""

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self._fields, self.file_name = reader.fields, path.name
        self._read: set[str] = set()
        self.architecture = str(self.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; from now on the key counts as understood."""
        self._read.add(key)
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def of_architecture(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: Any = None) -> Any:
        """A number of the architecture. Raises WeightsError where the file has a list: one value a layer."""
        value = self.of_architecture(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise self.refused(f"{self.architecture}.{key}", value)
        return value

    def required(self, key: str) -> Any:
        """A number that the architecture cannot do without. Raises WeightsError where it is missing."""
        value = self.number(key)
        if value is None:
            raise WeightsError(f"{self.file_name} lacks the key {self.architecture}.{key}")
        return value

    def names(self) -> list[str]:
        return list(self._fields)

    def refused(self, key: str, value: Any) -> WeightsError:
        shown = value if isinstance(value, str | int | float) else type(value).__name__
        return WeightsError(
            f"{self.file_name} says {key} = {shown}, which paceline does not know how to run; "
            f"use the model's safetensors directory instead"
        )

    @property
    def num_parts(self) -> int:
        """Files that hold the model together; 0 or 1: this one alone."""
        return int(self.get("split.count", 0))

    def check_whole_model(self) -> None:
        """Raise WeightsError if the file is something that is laid over a model."""
        kind = self.get("general.type", "model")
        if kind != "model":
            raise WeightsError(f"{self.file_name} holds no model but a part of another kind (general.type = {kind})")

    def not_whole(self) -> WeightsError:
        """For a part of a model whose name does not say where the others are."""
        return WeightsError(
            f"{self.file_name} is one of {self.num_parts} parts (split.count): name the first of them, called "
            f"…-00001-of-{self.num_parts:05}.gguf, with the others beside it, or join them (llama-gguf-split --merge)"
        )

    def check_all_understood(self, is_known: Callable[[str], bool] = lambda key: False) -> None:
        """Raise WeightsError for the first key that was not read and is not known to be harmless."""
        for key in self._fields:
            if not (key in self._read or is_known(key) or self._harmless(key)):
                raise self.refused(key, self.get(key))

    def _harmless(self, key: str) -> bool:
        if key in HARMLESS or key in TOKENIZER_KEYS or key.startswith(HARMLESS_PREFIXES):
            return True
        suffix = key.removeprefix(f"{self.architecture}.")
        if suffix in HARMLESS_OF_ARCHITECTURE:
            return True
        return suffix in NEUTRAL_VALUES and self._fields[key].contents() in NEUTRAL_VALUES[suffix]
