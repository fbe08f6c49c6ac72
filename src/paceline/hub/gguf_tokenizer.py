"""The tokenizer of a GGUF file: built by transformers, with what its GGUF route leaves out put right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import WeightsError
from paceline.hub.gguf_fields import GgufFields

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
GPT2_SPLIT = {"gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion", "granite-docling"}
DIGIT_SPLIT = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
BOS_BY_DEFAULT = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}


def save_tokenizer(gguf: Path, fields: GgufFields, folder: Path) -> None:
    """Write the tokenizer's files. Raises WeightsError where the file splits text in a way that is not known."""
    tokenizer = _without_surplus(_built_by_transformers(gguf, fields), len(fields.get("tokenizer.ggml.tokens", ())))
    kind, pre_tokenizer = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind == BYTE_LEVEL:
        _set_split(tokenizer, fields, pre_tokenizer)
    _set_prefix_space(tokenizer, fields, kind)
    _set_bos(tokenizer, fields, by_default=kind == SENTENCEPIECE or pre_tokenizer in BOS_BY_DEFAULT)
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers has no type for a disk that is full
        raise OSError(str(error)) from error


def _built_by_transformers(gguf: Path, fields: GgufFields) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, KeyError, OSError, TypeError, IndexError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(f"the tokenizer of {fields.file_name} cannot be read: {reason}") from error


def _without_surplus(built: Any, vocab_size: int) -> Any:
    """Without the tokens that transformers' classes add on their own: the model has no embedding for their ids.

    The generic class is saved, because the others put their own way of splitting text back when they are loaded.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    document = json.loads(built.backend_tokenizer.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < vocab_size]
    special = {name: token for name, token in built.special_tokens_map.items() if isinstance(token, str)}
    known = {name: token for name, token in special.items() if built.convert_tokens_to_ids(token) < vocab_size}
    backend = Tokenizer.from_str(json.dumps(document))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=built.chat_template, **known)


def _set_split(tokenizer: Any, fields: GgufFields, name: str | None) -> None:
    """Where text is cut before merges apply; transformers leaves GPT-2's rule for the names it does not know."""
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = tokenizer.backend_tokenizer
    if name in GPT2_SPLIT:
        backend.pre_tokenizer = byte_level
    elif name in DIGIT_SPLIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif '"Split"' not in json.dumps(json.loads(backend.to_str())["pre_tokenizer"]):
        raise fields.refused("tokenizer.ggml.pre", name)


def _set_prefix_space(tokenizer: Any, fields: GgufFields, kind: str) -> None:
    from tokenizers import decoders, pre_tokenizers

    fields.get("tokenizer.ggml.remove_extra_whitespaces")  # llama.cpp reads these two for unigram vocabularies alone,
    fields.get("tokenizer.ggml.precompiled_charsmap")  # and so does transformers
    if fields.get("tokenizer.ggml.add_space_prefix", True) or kind != SENTENCEPIECE:
        return
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _set_bos(tokenizer: Any, fields: GgufFields, *, by_default: bool) -> None:
    """Whether a prompt begins with the beginning-of-sequence token, as llama.cpp does it."""
    from tokenizers import processors

    if fields.get("tokenizer.ggml.add_eos_token", False):
        raise fields.refused("tokenizer.ggml.add_eos_token", "true")
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", by_default)) and tokenizer.bos_token is not None
    single = f"{tokenizer.bos_token} $A" if add_bos else "$A"
    special = [(tokenizer.bos_token, tokenizer.bos_token_id)] if add_bos else []
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
