"""An MTP (NEXTN) head drafts: the decoder layer that many models are published with to predict one token further.

It is paired, cached and reused as an EAGLE head is (drafting/eagle.py): the row at position t holds the target's state
after token t and the embedding of token t + 1. One module drafts as many tokens as asked for, each from its own output;
of several each drafts one (drafting/mtp_modules.py).
Gemma 4's assistant, a directory of its own, is a head without keys (drafting/gemma4_assistant.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Runner
from paceline.core.types import Capability
from paceline.drafting.eagle import MAX_BATCHED_ROWS, Eagle
from paceline.drafting.eagle_state import HeadState
from paceline.drafting.gemma4_assistant import AssistantDrafter
from paceline.drafting.head_folder import checked_target, optional_head_folder
from paceline.drafting.mtp_modules import ModuleDrafting
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, options_of
from paceline.errors import OptionError
from paceline.heads.checkpoint import gguf_file
from paceline.heads.gemma4_assistant import Gemma4Assistant, is_assistant
from paceline.heads.mtp import MtpHead, load_mtp, load_mtp_gguf
from paceline.heads.rounded import round_linears
from paceline.hub import locate
from paceline.hub.convert import unpacked_folder
from paceline.kv.prefix_cache import PrefixCache


class Mtp(Eagle):
    """Drafts with an MTP head."""

    owner = "mtp"

    def __init__(
        self,
        head: MtpHead,
        target: Runner,
        *,
        nodes: int = 0,
        branches: int = 4,
        depth: int = 8,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """nodes: of a tree, at most (num_draft_tokens may be fewer); 0 drafts chains. depth: of a tree, at most."""
        several = head.num_modules > 1
        if several and nodes:
            raise OptionError(f"an MTP head of {head.num_modules} modules drafts chains; leave nodes at 0")
        super().__init__(head, target, nodes=nodes, branches=branches, depth=depth, prefix_cache=prefix_cache)
        self._modules = ModuleDrafting(head, self._buffers, self._choose) if several else None

    def _chains(self, states: list[HeadState], num_draft_tokens: list[int]) -> list[DraftTree]:
        if self._modules is None:
            return super()._chains(states, num_draft_tokens)
        for state in states:
            if state.num_pending > MAX_BATCHED_ROWS:  # a prompt is read alone, unpadded
                self._modules.chains([state], [0])
        drafts = self._modules.chains(states, num_draft_tokens)
        return [draft.chain(state.seq) for draft, state in zip(drafts, states)]


# --- building ---------------------------------------------------------------------------------------------------------


def build(context: DrafterContext) -> Drafter:
    target = checked_target(SPEC.name, context.target, Capability.HIDDEN_STATES)
    name = target.info.name if context.draft_model is None else str(context.draft_model)
    folder = _folder(context, name)
    if is_assistant(folder):
        assistant = Gemma4Assistant.load(folder, dtype=context.head_dtype, device=context.device)
        return AssistantDrafter(assistant, checked_target(SPEC.name, target, Capability.SHARED_KEYS))
    head = _head(context, folder, name)
    if context.head_in_int8:
        round_linears(head)
    return Mtp(head, target, prefix_cache=context.prefix_cache, **context.options)


def _head(context: DrafterContext, folder: Path, name: str) -> MtpHead:
    options: dict[str, Any] = {"dtype": context.head_dtype, "device": context.device}
    file, target = gguf_file(folder), context.target.info.name
    if file is None:
        return load_mtp(folder, name, **options)
    return load_mtp_gguf(file, unpacked_folder(locate(target).folder), target, **options)


def _folder(context: DrafterContext, name: str) -> Path:
    """The directory given as the draft model, or that of the target itself."""
    own = optional_head_folder(context.draft_model)
    return unpacked_folder(locate(name).folder) if own is None else own


SPEC = DrafterSpec(
    name="mtp",
    summary="the MTP (NEXTN) head in the target's own checkpoint continues its hidden states",
    weights=WeightsNeeded.HEAD,
    build=build,
    options=options_of(Mtp),
    reference="DeepSeek-V3, https://arxiv.org/abs/2412.19437; multi-token prediction, https://arxiv.org/abs/2404.19737",
    head_kind="mtp",
)
