"""A GGUF file and its KV cache inside llama.cpp, through the low-level functions of llama-cpp-python.

Nothing here knows of rows or sequence caches: tokens with positions and sequence ids go in, logits come out.
"""

from __future__ import annotations

import importlib.util
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import MissingExtra, OutOfMemory, StepFailed, WeightsError

PACKAGE, EXTRA = "llama_cpp", "llama-cpp-python"
NUM_SEQS = 256  # sequence ids that llama.cpp tells apart
BATCH_TOKENS = 512  # tokens of one call
ALL_LAYERS = 1 << 16
NO_SLOT = 1  # llama_decode's answer where the KV cache is full
ERROR_LEVEL = 4
NO_FLASH_ATTENTION = 0
FLOAT32 = 0  # of keys and values: in sixteen bits a token's logits depend on how wide its pass was
TO_THE_END = -1


@dataclass(frozen=True, slots=True)
class BatchToken:
    """A token to read. seq_ids: the sequences that it belongs to; has_logits: whether its logits are read."""

    token: int
    position: int
    seq_ids: tuple[int, ...]
    has_logits: bool


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """num_tokens: of the KV cache, over all sequences; on_gpu: all layers run there."""

    num_tokens: int
    num_threads: int
    on_gpu: bool = False


class LlamaContext:
    """One model, up to NUM_SEQS sequences. For one thread at a time; memory is given back with the object."""

    def __init__(self, path: Path, settings: ContextSettings) -> None:
        self._api = _api()
        self._model = self._load_model(path, settings)
        self._context = self._open_context(path, settings)
        self._memory = self._api.llama_get_memory(self._context)
        self._batch = self._api.llama_batch_init(BATCH_TOKENS, 0, NUM_SEQS)
        self.vocab_size = int(self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model)))
        weakref.finalize(self, _give_back, self._api, self._model, self._context, self._batch)

    def _load_model(self, path: Path, settings: ContextSettings) -> Any:
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = ALL_LAYERS if settings.on_gpu else 0
        _log().forget()
        model = self._api.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise WeightsError(f"llama.cpp cannot load {path.name}: {_log().reason()}")
        return model

    def _open_context(self, path: Path, settings: ContextSettings) -> Any:
        """One KV cache for all sequences, of which windows keep everything: draft tokens can be taken back."""
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = max(settings.num_tokens, BATCH_TOKENS), NUM_SEQS  # it ends with fewer
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = settings.num_threads
        params.kv_unified = params.swa_full = True
        params.flash_attn_type, params.type_k, params.type_v = NO_FLASH_ATTENTION, FLOAT32, FLOAT32
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            self._api.llama_model_free(self._model)
            raise OutOfMemory(f"llama.cpp has no room for {settings.num_tokens} tokens of {path.name}: "
                              f"{_log().reason()}; lower --kv-cache-tokens")  # fmt: skip
        return context

    @property
    def takes_back(self) -> bool:
        """Whether the last tokens of a sequence can be forgotten: not those of recurrent states."""
        kinds = (self._api.llama_model_is_recurrent, self._api.llama_model_is_hybrid)
        return not any(is_kind(self._model) for is_kind in kinds)

    # --- passes -------------------------------------------------------------------------------------------------------

    def decode(self, tokens: list[BatchToken]) -> Tensor:
        """Read these tokens; logits of those that want them [tokens with logits, vocab].

        Raises OutOfMemory or StepFailed; the caller then removes what was read before that.
        """
        chunks = [tokens[start : start + BATCH_TOKENS] for start in range(0, len(tokens), BATCH_TOKENS)]
        return torch.cat([self._decode_chunk(chunk) for chunk in chunks])

    def _decode_chunk(self, tokens: list[BatchToken]) -> Tensor:
        self._fill(tokens)
        _log().forget()
        status = self._api.llama_decode(self._context, self._batch)
        if status == NO_SLOT:
            raise OutOfMemory("llama.cpp's KV cache is full: raise --kv-cache-tokens or run fewer sequences at a time")
        if status:
            raise StepFailed(f"llama.cpp could not read {len(tokens)} tokens: {_log().reason()}")
        places = [place for place, token in enumerate(tokens) if token.has_logits]
        logits = torch.empty(len(places), self.vocab_size)
        for row, place in enumerate(places):
            logits[row] = self._logits(place)
        return logits

    def _fill(self, tokens: list[BatchToken]) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token.token, token.position
            batch.logits[place] = token.has_logits
            batch.n_seq_id[place] = len(token.seq_ids)
            ids = batch.seq_id[place]
            for number, seq_id in enumerate(token.seq_ids):
                ids[number] = seq_id

    def _logits(self, place: int) -> Tensor:
        """A view of llama.cpp's own buffer [vocab]: the next call overwrites it."""
        pointer = self._api.llama_get_logits_ith(self._context, place)
        return torch.from_numpy(np.ctypeslib.as_array(pointer, shape=(self.vocab_size,)))

    # --- what is stored -----------------------------------------------------------------------------------------------

    def remove(self, seq_id: int, start: int = 0) -> None:
        """Forget the tokens of a sequence from this position on."""
        self._api.llama_memory_seq_rm(self._memory, seq_id, start, TO_THE_END)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """The target also holds these tokens of the source; nothing is moved."""
        self._api.llama_memory_seq_cp(self._memory, source, target, start, end)


def _give_back(api: Any, model: Any, context: Any, batch: Any) -> None:
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)


# --- the package ------------------------------------------------------------------------------------------------------


@cache
def _api() -> Any:
    """The functions of llama.h. Raises MissingExtra."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise MissingExtra("llama-cpp-python", EXTRA)
    import llama_cpp

    llama_cpp.llama_log_set(_log().callback(llama_cpp), None)
    llama_cpp.llama_backend_init()
    return llama_cpp


class LogTail:
    """llama.cpp's lines of trouble; the rest of its log is dropped."""

    def __init__(self) -> None:
        self._errors: list[str] = []
        self._callback: Any = None  # kept: llama.cpp calls it for as long as it is loaded

    def callback(self, api: Any) -> Any:
        self._callback = api.llama_log_callback(self._add)
        return self._callback

    def _add(self, level: int, text: bytes, _: Any) -> None:
        if level == ERROR_LEVEL:
            self._errors.append(text.decode(errors="replace").strip())

    def forget(self) -> None:
        """What follows has reasons of its own."""
        self._errors = []

    def reason(self) -> str:
        """The first line of trouble, without the name of a function in front."""
        return self._errors[0].split(": ", 1)[-1] if self._errors else "it does not say why"


@cache
def _log() -> LogTail:
    return LogTail()
