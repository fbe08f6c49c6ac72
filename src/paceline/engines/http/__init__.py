"""A server that is already running, by its address: anything with OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config import EngineConfig
from paceline.engines.registry import BuildLocal, EngineOption, EngineSpec

if TYPE_CHECKING:  # --help reads the SPEC and must not wait for torch
    from paceline.core.protocols import Engine

METHODS = ("none", "ngram", "suffix", "lookahead", "layerskip", "prediction")  # of a request to paceline's own server
OPTIONS = (
    EngineOption("url", "address of the server, such as http://localhost:8000"),
    EngineOption("api_key", "default: the environment variable OPENAI_API_KEY"),
    EngineOption("model", "name of the model on the server; default: --model, else its first"),
    EngineOption("tokenizer", "of the model, named like a model; without one, outputs are text alone"),
    EngineOption("server", "kind of the server where it does not say: vllm, sglang, llama.cpp, ollama, tgi, openai"),
    EngineOption("timeout", "seconds without a byte before the server counts as lost; default: 600"),
)


def _open(config: EngineConfig, build: BuildLocal) -> Engine:
    from paceline.engines.http.opening import open_http

    return open_http(config)


def _model_for(name: str) -> str | None:
    """Which model a server has is not known before it is asked, so none is taken to be the same."""
    return None


SPEC = EngineSpec(
    "http",
    "a running server with OpenAI's API: vLLM, SGLang, llama-server, TGI, Ollama, paceline",
    _open,
    options=OPTIONS,
    packages=("httpx",),
    remote=True,
    reads_files=False,
    methods=METHODS,
    model_for=_model_for,
)
