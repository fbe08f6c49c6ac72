"""Everything that claims to be a Runner or a Drafter. A new one is one line here, and the contracts hold it to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from paceline.core.protocols import Drafter
from paceline.drafting.auto import AutoDrafter
from paceline.drafting.cross_vocab import CrossVocab
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import Eagle
from paceline.drafting.layerskip import LayerSkip
from paceline.drafting.lookahead import Lookahead
from paceline.drafting.medusa import Medusa
from paceline.drafting.ngram import Ngram
from paceline.drafting.no_draft import NoDraft
from paceline.drafting.prediction import Prediction
from paceline.drafting.router import DrafterRouter
from paceline.drafting.suffix import Suffix
from paceline.heads.eagle import EAGLE_1, EAGLE_3, EagleConfig, EagleHead
from paceline.heads.exit_adapter import ExitAdapter, ExitConfig
from paceline.heads.medusa import MedusaConfig, MedusaHeads
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.native import NativeRunner
from paceline.runners.table import TableRunner
from tests.support.tiny import tiny_llama

MakeRunner = Callable[[], Any]  # a runner that can be looked into, too (Runner)
MakeDrafter = Callable[[TableRunner], Drafter]


def _table() -> TableRunner:
    return TableRunner(vocab_size=50, order=2, seed=3)


def _hugging_face() -> HuggingFaceRunner:
    return HuggingFaceRunner(tiny_llama(), "tiny")


def _native() -> NativeRunner:
    return NativeRunner.of_model(tiny_llama(), "tiny")


RUNNERS: dict[str, MakeRunner] = {"table": _table, "hugging-face": _hugging_face, "native": _native}


def _draft_model(target: TableRunner) -> Drafter:
    twin = TableRunner(target.info.vocab_size, target.order, target.seed, blur=0.3)
    return DraftModel(twin, target.info.vocab_size)


def _eagle(target: TableRunner, kind: str, **options: Any) -> Drafter:
    """A random head; the EAGLE-3 one cannot say the last two tokens."""
    size = target.info.vocab_size
    with torch.random.fork_rng():
        torch.manual_seed(7)
        output = size if kind == EAGLE_1 else size - 2
        head = EagleHead(EagleConfig(kind, size, 8, 2, 1, 2, size, output, size)).requires_grad_(False)
    return Eagle(head, target, **options)


def _medusa(target: TableRunner) -> Drafter:
    size = target.info.vocab_size
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Medusa(MedusaHeads(MedusaConfig(3, 1, size, size, size)).requires_grad_(False), target)


def _layerskip_adapted(target: TableRunner) -> Drafter:
    return LayerSkip(target, 1, ExitAdapter(ExitConfig(1, target.info.hidden_size, 2)).requires_grad_(False))


def _letters(tokens: str) -> Any:
    """A tokenizer of one token a letter, in this order."""
    model = Tokenizer(models.BPE({response: seq_id for seq_id, response in enumerate(tokens)}, []))
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model)


def _foreign(target: TableRunner, way: str) -> Drafter:
    """The target's blurred twin has the same letters in the opposite order."""
    size = target.info.vocab_size
    alphabet = "".join(chr(ord("A") + seq_id) for seq_id in range(size))
    return CrossVocab(TableRunner(size, blur=0.3), _letters(alphabet), _letters(alphabet[::-1]), size, way)


def _combined(target: TableRunner) -> Drafter:
    return AutoDrafter(Suffix(), {"draft": _draft_model(target)}, clock=lambda: 0.0)


DRAFTERS: dict[str, MakeDrafter] = {
    "nothing": lambda target: NoDraft(),
    "draft-model": _draft_model,
    "draft-is-target": lambda target: DraftModel(target, target.info.vocab_size),
    "ngram": lambda target: Ngram(shortest=1),
    "ngram-tree": lambda target: Ngram(shortest=1, branches=3),
    "suffix": lambda target: Suffix(),
    "lookahead": lambda target: Lookahead(columns=3, run=3),
    "prediction": lambda target: Prediction(),
    "foreign-text": lambda target: _foreign(target, "text"),
    "foreign-shared": lambda target: _foreign(target, "shared"),
    "combined": _combined,
    "by-text": lambda target: DrafterRouter({"suffix": Suffix(), "draft": _draft_model(target)}, "draft"),
    "eagle1": lambda target: _eagle(target, EAGLE_1),
    "eagle1-tree": lambda target: _eagle(target, EAGLE_1, nodes=3, branches=2),
    "eagle3": lambda target: _eagle(target, EAGLE_3),
    "eagle3-tree": lambda target: _eagle(target, EAGLE_3, nodes=3, branches=2),
    "medusa": _medusa,
    "layerskip": lambda target: LayerSkip(target, 2),
    "layerskip-adapted": _layerskip_adapted,
}
