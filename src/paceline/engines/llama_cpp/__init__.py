"""llama.cpp: GGUF files as they are, through the package xllamacpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config import DEFAULT_MODEL, EngineConfig
from paceline.engines.llama_cpp.options import METHODS, OPTIONS, LlamaCppOptions
from paceline.engines.registry import BuildLocal, EngineSpec

if TYPE_CHECKING:  # --help reads the SPEC and must not wait for torch
    from paceline.core.protocols import Engine


def _open(config: EngineConfig, build: BuildLocal) -> Engine:
    from paceline.engines.llama_cpp.opening import open_llama_cpp

    return open_llama_cpp(config)


def _model_for(name: str) -> str | None:
    """Only GGUF files; the default model has one."""
    return name if name == DEFAULT_MODEL or name.endswith(".gguf") else None


def _server_command(config: EngineConfig) -> str:
    from paceline.hub.gguf_model import gguf_path, locate_gguf

    gguf, draft = locate_gguf(str(config.model.model)), config.speculative.draft_model
    options = LlamaCppOptions.of(config, gguf.max_seq_len)
    return options.command(str(gguf.path), None if draft is None else str(gguf_path(str(draft))))


SPEC = EngineSpec(
    "llama_cpp",
    "llama.cpp in a process of its own: GGUF files as they are, CPU or GPU",
    _open,
    packs_gguf=True,
    bounds_windows=True,
    options=OPTIONS,
    per_request=False,
    drafts_with_logprobs=False,
    packages=("xllamacpp",),
    reads_files=False,
    methods=METHODS,
    model_for=_model_for,
    server_command=_server_command,
)
