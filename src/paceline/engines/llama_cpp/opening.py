"""EngineConfig -> llama.cpp in a process of its own -> an engine."""

from __future__ import annotations

import importlib.util
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import NONE, EngineConfig, ModelConfig
from paceline.core.types import ModelInfo, StructuredOutput
from paceline.engines.http.client import HttpClient
from paceline.engines.http.engine import Explain, RemoteEngine, RemoteParts
from paceline.engines.http.llama_cpp_wire import TAKEN_BY_LLAMA_CPP, LlamaCppWire
from paceline.engines.http.request_checks import RequestChecks
from paceline.engines.llama_cpp.options import LlamaCppOptions, check_supported
from paceline.engines.llama_cpp.process import LlamaCppProcess
from paceline.engines.local.structured_output import GrammarCompiler
from paceline.errors import EngineFailed, MissingExtra, OptionError, OutOfMemory, PacelineError, StepFailed
from paceline.hub.gguf_model import GgufModel, gguf_path, locate_gguf
from paceline.hub.locate import locate
from paceline.hub.tokenizer import Tokenizer, load_tokenizer

SUBJECT = "llama.cpp"
CACHE_FULL = "Context size has been exceeded"  # llama.cpp's words where sequences together have filled it


def open_llama_cpp(config: EngineConfig) -> RemoteEngine:
    """Raises MissingExtra, OptionError or ModelError before any request."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise MissingExtra("xllamacpp", "llama-cpp")
    check_supported(config)
    gguf = locate_gguf(_name(config.model.model))
    draft = config.speculative.draft_model
    options = LlamaCppOptions.of(config, gguf.max_seq_len)
    draft_file = None if draft is None or options.method == NONE else str(gguf_path(_name(draft)))
    api_key = secrets.token_urlsafe(24)
    settings = {"params": options.params(str(gguf.path), api_key), "speculative": options.speculative(draft_file)}
    tokenizer = _tokenizer(config.model, gguf)
    process = LlamaCppProcess(settings, gguf.name, show_log=options.log)
    try:
        client = HttpClient(process.url, api_key, subject=SUBJECT, use_proxy=False)
        return RemoteEngine(_parts(config, options, gguf, tokenizer, process, client))
    except BaseException:
        process.close()
        raise


def _parts(
    config: EngineConfig,
    options: LlamaCppOptions,
    gguf: GgufModel,
    tokenizer: Tokenizer,
    process: LlamaCppProcess,
    client: HttpClient,
) -> RemoteParts:
    info = _info(gguf, client.get_json("/v1/models")["data"][0]["meta"], process)
    info = replace(info, max_seq_len=min(info.max_seq_len, config.model.max_model_len or info.max_seq_len))
    wire = LlamaCppWire(
        info.max_seq_len,
        options.method,
        config.speculative.num_draft_tokens,
        tokenizer,
        cache_prompt=options.cache_prompt,
        eos_token_ids=info.eos_token_ids,
    )
    methods = (options.method,)
    checks = RequestChecks(info, methods, takes=TAKEN_BY_LLAMA_CPP, check_grammar=GrammarCheck(tokenizer, info))
    return RemoteParts(
        info,
        tokenizer,
        methods,
        client,
        wire,
        checks,
        options.max_num_seqs,
        explain=_explained(process),
        check_health=process.check_health,
        on_close=process.close,
    )


class GrammarCheck:
    """llama.cpp generates freely where it cannot read a grammar, so a grammar is compiled here before it is sent."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        self._tokenizer, self._info = tokenizer, info
        self._compiler: GrammarCompiler | None = None

    def __call__(self, output: StructuredOutput) -> None:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer.hf_tokenizer, self._info)
        self._compiler.compile(output)


def _info(gguf: GgufModel, meta: dict[str, Any], process: LlamaCppProcess) -> ModelInfo:
    context = int(meta.get("n_ctx", gguf.max_seq_len))
    return ModelInfo(
        gguf.name,
        int(meta.get("n_vocab", gguf.vocab_size)),
        gguf.eos_token_ids,
        min(context, gguf.max_seq_len),
        gguf.num_layers,
        gguf.hidden_size,
        process.device,
        str(meta.get("ftype", "gguf")),
    )


def _explained(process: LlamaCppProcess) -> Explain:
    """A lost connection to a process that has ended is told as its end, and a full KV cache with what helps."""

    def explain(error: PacelineError) -> PacelineError:
        if isinstance(error, StepFailed) and CACHE_FULL in str(error):
            return OutOfMemory("llama.cpp's KV cache is full; raise --kv-cache-tokens or lower --max-num-seqs")
        if isinstance(error, EngineFailed):
            try:
                process.check_after_failure()
            except EngineFailed as reason:
                return reason
        return error

    return explain


def _name(model: Any) -> str:
    if not isinstance(model, str):
        raise OptionError("llama.cpp opens a .gguf file by its name; a loaded model needs the engine local")
    return model


def _tokenizer(config: ModelConfig, gguf: GgufModel) -> Tokenizer:
    """The tokenizer given, or the one in the GGUF file."""
    tokenizer = config.tokenizer
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        files = locate(str(tokenizer))
        return Tokenizer(load_tokenizer(files.folder, files.name, trust_remote_code=config.trust_remote_code))
    return Tokenizer(load_tokenizer(gguf.tokenizer_folder, gguf.name) if tokenizer is None else tokenizer)
