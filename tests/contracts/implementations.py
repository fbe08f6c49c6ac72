"""Everything that implements Runner or Drafter, for the contract suites. Drafters come from the registry."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from paceline.core.protocols import Drafter
from paceline.drafting.auto import AutoDrafter
from paceline.drafting.cross_vocab import CrossVocab
from paceline.drafting.dflash import DFlash
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import Eagle
from paceline.drafting.layerskip import LayerSkip
from paceline.drafting.lookahead import Lookahead
from paceline.drafting.medusa import Medusa
from paceline.drafting.mtp import Mtp
from paceline.drafting.ngram import Ngram
from paceline.drafting.registry import build_drafter, names
from paceline.drafting.router import DrafterRouter
from paceline.drafting.suffix import Suffix
from paceline.heads.eagle import EagleHead
from paceline.heads.eagle1 import Eagle1Config, Eagle1Head
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head
from paceline.heads.exit_adapter import ExitAdapter, ExitConfig
from paceline.heads.medusa import MedusaConfig, MedusaHeads
from paceline.heads.peagle import PEagleConfig, PEagleHead
from paceline.hub.convert import convert_gguf
from paceline.models import registry
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.huggingface_probe import open_hugging_face
from paceline.runners.native import NativeRunner, stored_dtype
from paceline.runners.table import TableRunner
from tests.support.dflash import toy_head
from tests.support.drafter_exactness import context_for
from tests.support.families import Variant, tiny_family
from tests.support.gguf import mix, write_gguf
from tests.support.mtp_heads import toy_mtp_head
from tests.support.tiny import tiny_llama

MakeRunner = Callable[[], Any]  # a runner that can be looked into, too (Runner)
MakeDrafter = Callable[[TableRunner], Drafter]


def _table() -> TableRunner:
    return TableRunner(vocab_size=50, order=2, seed=3)


def _hugging_face() -> HuggingFaceRunner:
    return HuggingFaceRunner(tiny_llama(), "tiny")


def _native() -> NativeRunner:
    return NativeRunner.of_model(tiny_llama(), "tiny")


@cache
def _gguf_folder() -> tempfile.TemporaryDirectory[str]:
    """A file with blocks of several kinds, converted; gone when the process ends."""
    folder = tempfile.TemporaryDirectory()
    kinds = {"attn_q": "Q4_0", "attn_k": "IQ4_XS", "attn_v": "Q8_0", "attn_output": "Q3_K", "ffn_gate": "Q2_K"}
    kinds |= {"ffn_down": "Q5_1", "token_embd": "IQ4_NL"}
    model = tiny_llama(eos_token_id=258, hidden_size=256)
    path = write_gguf(Path(folder.name, "tiny.gguf"), model, kinds=mix("Q4_1", **kinds))
    files = Path(folder.name, "files")
    files.mkdir()
    convert_gguf(path, files)
    return folder


def _native_gguf() -> Any:
    files = Path(_gguf_folder().name, "files")
    return NativeRunner.load(files, "tiny", stored_dtype(files, None, "cpu"), "cpu")


def _llama_cpp() -> Any:
    """The tiny model's weights as they are, in llama.cpp. It has read the file before the folder is gone."""
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    from paceline.runners.llama_cpp import open_llama_cpp

    with tempfile.TemporaryDirectory() as folder:
        return open_llama_cpp(str(write_gguf(Path(folder, "tiny.gguf"), tiny_llama(eos_token_id=258))), "cpu")


@cache
def _family_model(model_type: str) -> Any:
    return tiny_family(Variant(model_type))


def _own_state(model_type: str) -> MakeRunner:
    """A transformers model that the row buffers do not fit: it runs with its own cache."""
    return lambda: open_hugging_face(_family_model(model_type), model_type)


def _native_family(model_type: str) -> MakeRunner:
    """With windows that the sequences of the contract fill."""
    changes = {"sliding_window": 4}
    return lambda: NativeRunner.of_model(tiny_family(Variant(model_type, changes=changes)), model_type)


RUNNERS: dict[str, MakeRunner] = {
    "table": _table,
    "hugging-face": _hugging_face,
    "hugging-face-hybrid": _own_state("qwen3_next"),
    "hugging-face-alibi": _own_state("bloom"),
    "hugging-face-no-cache": _own_state("openai-gpt"),
    "native": _native,
    "native-gguf": _native_gguf,
    "llama-cpp": _llama_cpp,
    "native-windows": _native_family("gemma3_text"),
    "native-softcaps": _native_family("gemma2"),
    "native-sinks": _native_family("gpt_oss"),
}


def _architecture(model_type: str) -> MakeRunner:
    return lambda: NativeRunner.of_model(_family_model(model_type), model_type)


# Every architecture that runs natively. A family with its own file in models/ is in the contract as soon as it is
# registered; transformers builds the small model it is tried with.
ARCHITECTURES: dict[str, MakeRunner] = {
    f"native-{model_type}": _architecture(model_type) for model_type in registry.model_types()
}


# --- drafters ---------------------------------------------------------------------------------------------------------


def _draft_model(target: TableRunner) -> Drafter:
    twin = TableRunner(target.info.vocab_size, target.order, target.seed, blur=0.3)
    return DraftModel(twin, target.info.vocab_size)


def _eagle1(target: TableRunner, **options: Any) -> Drafter:
    size = target.info.vocab_size
    return _eagle(lambda: Eagle1Head(Eagle1Config(size, 8, 2, 1, 2, size, size, size)), target, **options)


def _eagle3(target: TableRunner, **options: Any) -> Drafter:
    """The head cannot predict the last two tokens."""
    size = target.info.vocab_size
    return _eagle(lambda: Eagle3Head(Eagle3Config(size, 8, 2, 1, 2, size, size - 2, size)), target, **options)


def _peagle(target: TableRunner) -> Drafter:
    size = target.info.vocab_size
    config = PEagleConfig(size, 8, 2, 1, 2, size, size - 2, size, num_layers=2, mask_token_id=1)
    return _eagle(lambda: PEagleHead(config), target)


def _eagle(make_head: Callable[[], EagleHead], target: TableRunner, **options: Any) -> Drafter:
    """A random head."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        head = make_head().requires_grad_(False)
    return Eagle(head, target, **options)


def _medusa(target: TableRunner) -> Drafter:
    size = target.info.vocab_size
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Medusa(MedusaHeads(MedusaConfig(3, 1, size, size, size)).requires_grad_(False), target)


def _dflash(variant: str, **options: Any) -> MakeDrafter:
    """A random head."""
    return lambda target: DFlash(toy_head(variant, seed=7, vocab_size=target.info.vocab_size), target, **options)


def _layerskip_adapted(target: TableRunner) -> Drafter:
    return LayerSkip(target, 1, ExitAdapter(ExitConfig(1, target.info.hidden_size, 2)).requires_grad_(False))


def _letters(letters: str) -> Any:
    """A tokenizer of one token per letter, in this order."""
    model = Tokenizer(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model)


def _cross_vocab(target: TableRunner, way: str) -> Drafter:
    """The target's blurred twin has the same letters in the opposite order."""
    size = target.info.vocab_size
    alphabet = "".join(chr(ord("A") + token) for token in range(size))
    return CrossVocab(TableRunner(size, blur=0.3), _letters(alphabet), _letters(alphabet[::-1]), size, way)


def _auto(target: TableRunner) -> Drafter:
    return AutoDrafter({"suffix": Suffix()}, {"draft_model": _draft_model(target)}, clock=lambda: 0.0)


def _from_registry(name: str) -> MakeDrafter:
    return lambda target: build_drafter(name, context_for(target))


# Methods that need weights, or that would draft too little with their defaults; all others are built by the registry.
VARIANTS: dict[str, dict[str, MakeDrafter]] = {
    "draft_model": {"": _draft_model, "is-target": lambda target: DraftModel(target, target.info.vocab_size)},
    "cross_vocab": {
        "text": lambda target: _cross_vocab(target, "text"),
        "shared": lambda target: _cross_vocab(target, "shared"),
    },
    "ngram": {"": lambda target: Ngram(shortest=1), "tree": lambda target: Ngram(shortest=1, branches=3)},
    "lookahead": {"": lambda target: Lookahead(columns=3, run=3)},
    "layerskip": {"": lambda target: LayerSkip(target, 2), "adapted": _layerskip_adapted},
    "medusa": {"": _medusa},
    "eagle": {
        "1": _eagle1,
        "1-tree": lambda target: _eagle1(target, nodes=3, branches=2),
        "3": _eagle3,
        "3-tree": lambda target: _eagle3(target, nodes=3, branches=2),
        "parallel": _peagle,
    },
    "mtp": {"": lambda target: Mtp(toy_mtp_head(vocab_size=target.info.vocab_size), target)},
    "dflash": {
        "1": _dflash("dflash"),
        "2": _dflash("dflash2"),
        "dspark": _dflash("dspark"),
        "jetspec-tree": _dflash("jetspec", nodes=3, branches=2),
    },
    "auto": {"": _auto},
    "router": {
        "": lambda target: DrafterRouter({"suffix": Suffix(), "draft_model": _draft_model(target)}, "draft_model")
    },
}
DRAFTERS: dict[str, MakeDrafter] = {
    "-".join(filter(None, (name, variant))): make
    for name in (*names(), "router")
    for variant, make in VARIANTS.get(name, {"": _from_registry(name)}).items()
}
