"""GGUF -> a Hugging Face directory.

Files of the architectures in gguf_architectures.py stay as they are: the directory has the config, the tokenizer and an
index of where each tensor lies. `unpacked_folder` makes safetensors of them for those who read nothing else; quantized
tensors become bf16. Other architectures go through transformers' own GGUF route, which holds the whole model in memory
once. Either way a key or a tensor that is not understood is an error.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import WeightsError
from paceline.hub.cache import cached_directory
from paceline.hub.gguf_architectures import ARCHITECTURES
from paceline.hub.gguf_eos import eos_token_ids
from paceline.hub.gguf_fields import GgufFields
from paceline.hub.gguf_index import INDEX, has_index, read_index, write_index
from paceline.hub.model_config import DecoderSizes, decoder_sizes

if TYPE_CHECKING:
    from gguf import GGUFReader

    from paceline.hub.gguf_tensors import GgufPart, GgufTensors

CONVERTER = 5  # part of the key of the cache: what an older converter wrote is not used again
SIZE_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the directory of a GGUF file. Raises WeightsError."""
    from paceline.hub.gguf_tokenizer import save_tokenizer

    _check_first_part(gguf)
    reader = open_gguf(gguf)
    fields = GgufFields(reader, gguf)
    fields.check_whole_model()
    save_tokenizer(gguf, fields, folder)
    if fields.architecture in ARCHITECTURES:
        _describe(_parts(gguf, reader, fields), fields, folder)
    else:
        from paceline.hub.gguf_transformers import convert_by_transformers

        if fields.num_parts > 1:
            raise fields.not_whole()
        convert_by_transformers(gguf, reader, fields, folder)


def open_gguf(gguf: Path, *, has_model: bool = True) -> GGUFReader:
    """A file that says what model it holds, or a further part of one. Raises WeightsError."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except (ValueError, OSError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise WeightsError(f"{gguf} is not a readable GGUF file ({error}); is it complete?") from error
    if has_model and "general.architecture" not in reader.fields:
        raise WeightsError(f"{gguf.name} does not say what model it holds (general.architecture)")
    return reader


def unpacked_folder(folder: Path) -> Path:
    """The directory itself, or where its weights are in GGUF files one with the same model in safetensors."""
    if not has_index(folder):
        return folder

    def fill(made: Path) -> None:
        shutil.copytree(folder, made, dirs_exist_ok=True)
        unpack(made)

    return cached_directory(f"{folder.name}-unpacked", fill)


def unpack(folder: Path) -> None:
    """Put the weights into the directory itself, as safetensors."""
    from safetensors.torch import save_file

    from paceline.hub.gguf_tensors import unpacked

    if not has_index(folder):
        return
    save_file(dict(unpacked(read_index(folder))), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / INDEX).unlink()


def _describe(parts: list[GgufPart], fields: GgufFields, folder: Path) -> None:
    from paceline.hub.gguf_tensors import GgufTensors

    architecture = ARCHITECTURES[fields.architecture]
    tensors = GgufTensors(parts, architecture, _num_layers(fields))
    sizes = _sizes(fields, tensors.vocab_size)
    config = architecture.config(fields, _config(fields, tensors, sizes))
    fields.check_all_understood()
    write_index(folder, tensors.index(sizes.num_heads, sizes.num_kv_heads))
    names = {"model_type": architecture.model_type, "architectures": [architecture.class_name]}
    _write_config(config | names, folder)


def _check_first_part(gguf: Path) -> None:
    """Only the first of several files says what model they hold. Raises WeightsError for another."""
    name = PART_NAME.fullmatch(gguf.name)
    if name is not None and int(name[2]) > 1:
        first = f"{name[1]}-00001-of-{name[3]}.gguf"
        raise WeightsError(f"{gguf.name} is one of {int(name[3])} parts of a model; name the first of them, {first}")


def _parts(gguf: Path, reader: GGUFReader, fields: GgufFields) -> list[GgufPart]:
    """Every file of a model, the one that was named first. Raises WeightsError where one is missing."""
    from paceline.hub.gguf_tensors import GgufPart

    first, count, name = GgufPart(gguf, reader), fields.num_parts, PART_NAME.fullmatch(gguf.name)
    if count <= 1:
        return [first]
    if name is None or int(name[3]) != count:
        raise fields.not_whole()
    others = [gguf.with_name(f"{name[1]}-{part:05}-of-{count:05}.gguf") for part in range(2, count + 1)]
    for path in others:
        if not path.is_file():
            raise WeightsError(f"{gguf.name} is one of {count} parts, and {path.name} is not beside it")
    return [first, *(GgufPart(path, open_gguf(path, has_model=False)) for path in others)]


def _num_layers(fields: GgufFields) -> int:
    return int(fields.number("block_count", 0))


def _sizes(fields: GgufFields, vocab_size: int) -> DecoderSizes:
    metadata = {key: fields.number(gguf_key) for key, gguf_key in SIZE_KEYS.items()}
    sizes = decoder_sizes({**metadata, "vocab_size": vocab_size}, fields.file_name)
    value_size = fields.number("attention.value_length", sizes.head_dim)
    if value_size != sizes.head_dim:
        raise fields.refused(f"{fields.architecture}.attention.value_length", value_size)
    return sizes


def _config(fields: GgufFields, tensors: GgufTensors, sizes: DecoderSizes) -> dict[str, Any]:
    """What all architectures have of a Hugging Face config."""
    from paceline.hub.gguf_rope import rope_parameters

    factors = tensors.frequency_factors
    numbers = None if factors is None else factors.numpy()
    rope = rope_parameters(fields, sizes.head_dim, sizes.max_seq_len, numbers)
    return {
        **_size_keys(sizes),
        "hidden_act": "silu",
        # GGUF stores float32: without the rounding 1e-5 would come back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields.number('attention.layer_norm_rms_epsilon', 1e-6):.6g}"),
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "attention_bias": tensors.attention_bias,
        "tie_word_embeddings": tensors.tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(fields),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _size_keys(sizes: DecoderSizes) -> dict[str, int]:
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_seq_len,
    }


def _write_config(config: dict[str, Any], folder: Path) -> None:
    from transformers import __version__

    config["transformers_version"] = __version__  # without it a Qwen tokenizer is taken for a faulty Mistral one
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
