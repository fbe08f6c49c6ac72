"""EngineConfig -> a connection to a running server -> an engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import AUTO, DEFAULT_MODEL, NONE, EngineConfig
from paceline.core.types import ModelInfo
from paceline.engines.http.acceptance import counts_in_metrics
from paceline.engines.http.client import HttpClient, Json, server_url
from paceline.engines.http.engine import METRICS, RemoteEngine, RemoteParts
from paceline.engines.http.llama_cpp_wire import TAKEN_BY_LLAMA_CPP, LlamaCppWire
from paceline.engines.http.openai_wire import OpenAIWire
from paceline.engines.http.request_checks import TAKEN, RequestChecks
from paceline.engines.http.server_kinds import KINDS, LLAMA_CPP, PACELINE, ServerKind, kind_of_owner
from paceline.engines.http.text_tokenizer import TextTokenizer
from paceline.engines.http.wire import Wire
from paceline.errors import OptionError, PacelineError
from paceline.hub import default
from paceline.hub.cache import cache_folder
from paceline.hub.gguf_model import locate_gguf
from paceline.hub.locate import locate
from paceline.hub.tokenizer import Tokenizer, load_tokenizer

API_KEY_VARIABLE = "OPENAI_API_KEY"
TIMEOUT = 600.0
NO_LIMIT = 1 << 31  # of tokens, where the server does not say one
MAX_LOGPROBS = 20  # as vLLM and paceline have it
SERVER = "server"  # the method of a server that drafts as it was started


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of a server: its entry in /v1/models, and the kind of the server."""

    name: str
    entry: Json
    kind: ServerKind

    @property
    def own_details(self) -> Json:
        return dict(self.entry.get("x_paceline") or {})

    @property
    def meta(self) -> Json:
        return dict(self.entry.get("meta") or {})

    @property
    def max_seq_len(self) -> int:
        """Tokens of prompt and answer, wherever the server says it."""
        places = (
            self.entry.get("max_model_len"), self.own_details.get("max_model_len"),
            self.meta.get("n_ctx"), self.meta.get("n_ctx_train"), self.entry.get("context_length"),
        )  # fmt: skip
        return next((int(place) for place in places if place), NO_LIMIT)

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.own_details.get("methods") or ()) or (SERVER,)


def open_http(config: EngineConfig) -> RemoteEngine:
    """Raises OptionError, or EngineFailed where the server cannot be reached."""
    options = config.engine_options
    if "url" not in options:
        raise OptionError("the engine http needs the address of a server: --engine-option url=http://localhost:8000")
    key = options.get("api_key", os.environ.get(API_KEY_VARIABLE))
    client = HttpClient(server_url(options["url"]), key, read_timeout=_timeout(options.get("timeout", TIMEOUT)))
    model = _served_model(client, config)
    _check_speculation(config, model)
    return RemoteEngine(_parts(config, client, model))


def _parts(config: EngineConfig, client: HttpClient, model: ServedModel) -> RemoteParts:
    tokenizer = _tokenizer(config, model)
    knows_tokens = tokenizer is not None
    tokenizer = tokenizer or TextTokenizer()
    longest = min(model.max_seq_len, config.model.max_model_len or NO_LIMIT) if knows_tokens else NO_LIMIT
    info = _info(model, tokenizer, longest)
    methods = _methods(config, model)
    wire: Wire
    takes = TAKEN | model.kind.request_fields
    if model.kind is LLAMA_CPP and knows_tokens:
        method = SERVER if _speculates(client) else NONE
        methods, wire = (method,), LlamaCppWire(
            info.max_seq_len, method, tokenizer=tokenizer, eos_token_ids=info.eos_token_ids
        )
        takes = TAKEN_BY_LLAMA_CPP
    else:
        wire = _openai_wire(config, model, tokenizer, knows_tokens)
    checks = RequestChecks(info, methods, MAX_LOGPROBS, takes)
    return RemoteParts(info, tokenizer, methods, client, wire, checks, reads_metrics=_reads_metrics(client, model.kind))


def _openai_wire(config: EngineConfig, model: ServedModel, tokenizer: Tokenizer, knows_tokens: bool) -> OpenAIWire:
    method, number = config.speculative.method, config.speculative.num_draft_tokens
    return OpenAIWire(
        model.kind,
        model.name,
        tokenizer,
        knows_tokens,
        None if method == NONE else method,
        None if number == AUTO else int(number),
    )


def _served_model(client: HttpClient, config: EngineConfig) -> ServedModel:
    """The model that the user names, or the first. Raises OptionError."""
    document = client.get_json("/v1/models")
    entries = document.get("data") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise OptionError(f"{client.subject} lists no model")
    name = config.engine_options.get("model") or config.model.model
    if not isinstance(name, str):
        raise OptionError("the engine http takes a model by its name on the server")
    names = [str(entry.get("id")) for entry in entries]
    if name not in names:
        if name != DEFAULT_MODEL:
            raise OptionError(f"{client.subject} has no model {name!r}; it has {', '.join(names[:8])}")
        name = names[0]
    entry = entries[names.index(name)]
    return ServedModel(name, entry, _kind(config.engine_options.get("server"), str(entry.get("owned_by"))))


def _kind(named: Any, owner: str) -> ServerKind:
    if named is None:
        return kind_of_owner(owner)
    if named not in KINDS:
        raise OptionError(f"engine option server must be one of {', '.join(KINDS)}; not {named!r}")
    return KINDS[named]


def _check_speculation(config: EngineConfig, model: ServedModel) -> None:
    """Raise OptionError for what only the one who starts the server decides."""
    speculative = config.speculative
    if speculative.draft_model is not None or speculative.drafter is not None:
        raise OptionError("the engine http takes no draft model: name it where the server is started")
    if model.kind is not PACELINE and (speculative.method != NONE or speculative.num_draft_tokens != AUTO):
        raise OptionError("this server decides itself how it drafts; set that where it is started")
    if model.kind is PACELINE and speculative.method not in (NONE, *model.methods):
        raise OptionError(f"method must be one of {', '.join(model.methods)}; not {speculative.method!r}")


def _methods(config: EngineConfig, model: ServedModel) -> tuple[str, ...]:
    """The default first: the one that the user names, else the server's."""
    chosen = config.speculative.method or NONE
    first = (chosen,) if chosen != NONE else ()
    return tuple(dict.fromkeys((*first, *model.methods)))


def _info(model: ServedModel, tokenizer: Tokenizer, longest: int) -> ModelInfo:
    """A server says nothing of layers and sizes."""
    eos = tokenizer.hf_tokenizer.eos_token_id
    vocab_size = max(len(tokenizer.hf_tokenizer), int(model.meta.get("n_vocab", 0)))
    dtype = str(model.own_details.get("dtype") or model.meta.get("ftype") or "unknown")
    return ModelInfo(
        model.name, vocab_size, frozenset(() if eos is None else (int(eos),)), longest, 0, 0, SERVER, dtype
    )


def _tokenizer(config: EngineConfig, model: ServedModel) -> Tokenizer | None:
    """The tokenizer that the user names, or that of a model which lies on this machine; None: there is none."""
    named = config.engine_options.get("tokenizer") or config.model.tokenizer
    if isinstance(named, Tokenizer):
        return named
    if named is not None and not isinstance(named, str | Path):
        return Tokenizer(named)
    if named is not None and str(named).endswith(".gguf"):
        return Tokenizer(load_tokenizer(locate_gguf(str(named)).tokenizer_folder, str(named)))
    if named is not None:
        return Tokenizer(load_tokenizer(locate(str(named)).folder, str(named)))
    folder = _local_folder(model)
    return None if folder is None else Tokenizer(load_tokenizer(folder, model.name))


def _local_folder(model: ServedModel) -> Path | None:
    """A directory of this machine that holds the tokenizer of a served model."""
    path = Path(str(model.entry.get("root") or model.name))
    if model.kind is PACELINE and model.name == DEFAULT_MODEL:
        folder = cache_folder() / default.DIRECTORY
        return folder if folder.is_dir() else None
    if model.kind is LLAMA_CPP and path.is_absolute() and path.suffix == ".gguf" and path.is_file():
        return locate_gguf(str(path)).tokenizer_folder
    return path if path.is_absolute() and (path / "tokenizer.json").is_file() else None


def _speculates(client: HttpClient) -> bool:
    """Whether a llama-server drafts, as far as it tells."""
    try:
        states = client.get_json("/slots")
    except PacelineError:
        return False
    return bool(isinstance(states, list) and states and states[0].get("speculative"))


def _reads_metrics(client: HttpClient, kind: ServerKind) -> bool:
    """Whether the counters of the server are the only place that tells its draft tokens."""
    if kind in (PACELINE, LLAMA_CPP):
        return False
    try:
        return counts_in_metrics(client.get(METRICS)) is not None
    except PacelineError:
        return False


def _timeout(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise OptionError(f"engine option timeout must be a number of seconds above 0, not {value!r}")
    return float(value)
