"""The tokenizer of a model that the user has named: opened, or compared with that of another model.

Two tokenizers of a large vocabulary take more than a second to open and compare, and their files rarely change: that
they are the same is kept, by the files of both and the versions that read them (hub/resolved.py).
"""

from __future__ import annotations

from pathlib import Path

from paceline.config import LLAMA_CPP_RUNNER, ModelConfig
from paceline.errors import OptionError
from paceline.hub.gguf_model import locate_gguf
from paceline.hub.locate import ModelFiles, locate
from paceline.hub.resolved import keep_resolved, read_resolved, resolved_pair
from paceline.hub.resolved_tokenizer import kept_tokenizer, read_kept_tokenizer, read_tokenizer
from paceline.hub.tokenizer import Tokenizer
from paceline.hub.vocabulary import VocabularyComparison, compare


def open_tokenizer(config: ModelConfig) -> Tokenizer:
    """The tokenizer given, or the one that lies beside the model."""
    tokenizer = config.tokenizer
    if isinstance(tokenizer, Tokenizer):
        tokenizer.kept = None  # the user may have changed it
        return tokenizer
    if _is_loaded(config):
        return Tokenizer(tokenizer)
    files = _files(config)
    return _opened(config, files, kept_tokenizer(files.folder, trust_remote_code=config.trust_remote_code))


def compare_tokenizers(target: Tokenizer, draft: ModelConfig) -> VocabularyComparison | None:
    """Compare with the tokenizer of a draft model. None: an earlier start has found of the same files that they have
    the same vocabulary, so the draft model's is not opened."""
    files = _files(draft)
    own = kept_tokenizer(files.folder, trust_remote_code=draft.trust_remote_code)
    pair = None if target.kept is None or own is None else resolved_pair("vocabulary", target.kept, own)
    if pair is not None and read_resolved(pair) == _same(pair):
        return None
    comparison = compare(target.hf_tokenizer, _opened(draft, files, own).hf_tokenizer)
    if pair is not None and comparison.same:
        keep_resolved(pair, _same(pair))
    return comparison


def _same(pair: Path) -> str:
    """What is kept of a pair. With its own name in it, no other file is taken for it."""
    return f"{pair.name}: the same vocabulary\n"


def _opened(config: ModelConfig, files: ModelFiles, kept: Path | None) -> Tokenizer:
    """kept: where it is kept by its files; None: they do not say what it is."""
    if kept is None:
        return Tokenizer(read_tokenizer(files.folder, files.name, trust_remote_code=config.trust_remote_code))
    return Tokenizer(read_kept_tokenizer(files.folder, files.name, kept), kept)


def _is_loaded(config: ModelConfig) -> bool:
    """Whether the user gave a tokenizer and not the name of one."""
    return config.tokenizer is not None and not isinstance(config.tokenizer, str | Path)


def _files(config: ModelConfig) -> ModelFiles:
    """The directory that a tokenizer is read from."""
    tokenizer, model = config.tokenizer, config.model
    name = tokenizer or (model if isinstance(model, str) else model.config._name_or_path)
    if not name:
        raise OptionError("a loaded model that was not read from a directory needs tokenizer=...")
    if config.runner == LLAMA_CPP_RUNNER and tokenizer is None:
        gguf = locate_gguf(str(name))
        return ModelFiles(gguf.name, gguf.tokenizer_folder)
    return locate(str(name))
