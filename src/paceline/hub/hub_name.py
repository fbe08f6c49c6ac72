"""Names of models on the Hugging Face Hub.

    org/name             the model's safetensors; its GGUF file where it has one and nothing else
    org/name:Q4_K_M      the GGUF file of this quantization, with all its parts
    org/name:file.gguf   this GGUF file
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from paceline.errors import ModelNotFound

HUB_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<gguf>[\w./-]+))?")
GGUF = ".gguf"
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Beside a model's own tensors: a picture encoder, and statistics for quantizing.
OTHER_GGUF = ("mmproj", "imatrix")
SMALL_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
PICKLED_HEADS = ("medusa_lm_head.pt",)  # Medusa's own layout
BESIDE_HEADS = ("mask_embedding.pt",)  # a DFlash head may keep the vector of its mask token here
NOT_THE_MODEL = ("consolidated", "training_args", "optimizer")  # a second copy of the weights, or what trained them


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, and which of its GGUF files is meant; None: the safetensors."""

    repository: str
    gguf: str | None = None

    def __str__(self) -> str:
        return self.repository if self.gguf is None else f"{self.repository}:{self.gguf}"


def hub_name(text: str) -> HubName | None:
    """The parts of a name; None: it is no name of the Hub."""
    match = HUB_NAME.fullmatch(text)
    return None if match is None else HubName(match["repository"], match["gguf"])


def chosen_files(name: HubName, files: Iterable[str]) -> list[str]:
    """The files of a repository that make the model of this name; small ones first. Raises ModelNotFound."""
    files = sorted(files)
    if name.gguf is not None:
        return gguf_parts(_chosen_gguf(name, files))
    weights = _weights(files)
    if not weights:
        return gguf_parts(_only_gguf(name, files))
    small = [file for file in files if "/" not in file and (file.endswith(SMALL_FILES) or file in BESIDE_HEADS)]
    return [*small, *weights]


def gguf_parts(file: str) -> list[str]:
    """A GGUF file with every other part of the same model, the first part first."""
    match = PART.fullmatch(file)
    if match is None:
        return [file]
    return [f"{match['stem']}-{number:05d}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1)]


def is_gguf_choice(files: list[str]) -> bool:
    return files[0].endswith(GGUF)


def _weights(files: list[str]) -> list[str]:
    """Safetensors, else what torch pickled. Folders hold other forms of the same weights."""
    top = [file for file in files if "/" not in file and not file.startswith(NOT_THE_MODEL)]
    for ends in ((".safetensors",), (".bin",), PICKLED_HEADS):
        if weights := [file for file in top if file.endswith(ends)]:
            return weights
    return []


def _models(files: list[str]) -> list[str]:
    """GGUF files that begin a model: of one in parts, the first part."""
    whole = [f for f in files if f.endswith(GGUF) and not any(word in _file_name(f).lower() for word in OTHER_GGUF)]
    return [file for file in whole if gguf_parts(file)[0] == file]


def _chosen_gguf(name: HubName, files: list[str]) -> str:
    choice, models = str(name.gguf), _models(files)
    if choice.endswith(GGUF):
        matches = [file for file in models if choice in (file, _file_name(file))]
    else:
        matches = [file for file in models if _has_tag(file, choice)]
    if not matches:
        have = f"it has {_listed(name, models)}" if models else "it has no GGUF files"
        raise ModelNotFound(f"{name.repository} has no GGUF file {choice}; {have}")
    # Of model-Q4_K_M and model-UD-Q4_K_M the plain one is meant.
    return min(matches, key=lambda file: (len(_stem(file)), file))


def _only_gguf(name: HubName, files: list[str]) -> str:
    models = _models(files)
    if len(models) > 1:
        raise ModelNotFound(f"{name.repository} holds several GGUF files; name one of {_listed(name, models)}")
    if not models:
        raise ModelNotFound(f"{name.repository} holds no weights that can be read (*.safetensors, *.gguf)")
    return models[0]


def _listed(name: HubName, models: list[str]) -> str:
    return ", ".join(f"{name.repository}:{_file_name(file)}" for file in models)


def _has_tag(file: str, tag: str) -> bool:
    return re.search(rf"(?:^|[-._/]){re.escape(tag)}(?:$|[-._/])", _stem(file), re.IGNORECASE) is not None


def _stem(file: str) -> str:
    """The path without its end and without the number of the part."""
    match = PART.fullmatch(file)
    return match["stem"] if match else file.removesuffix(GGUF)


def _file_name(file: str) -> str:
    return PurePosixPath(file).name
