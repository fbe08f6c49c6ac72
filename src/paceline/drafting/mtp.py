"""An MTP (NEXTN) head drafts: the decoder layer that many models are published with to predict one token further.

It is paired, cached and reused as an EAGLE head is (drafting/eagle.py): the row at position t holds the target's state
after token t and the embedding of token t + 1. One layer drafts as many tokens as asked for, each from its own output.
Gemma 4's assistant, a directory of its own, is a head without keys (drafting/gemma4_assistant.py).
"""

from __future__ import annotations

from pathlib import Path

from paceline.core.protocols import Drafter, Runner
from paceline.core.types import Capability
from paceline.drafting.eagle import Eagle
from paceline.drafting.gemma4_assistant import AssistantDrafter
from paceline.drafting.head_folder import checked_target, optional_head_folder
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, options_of
from paceline.heads.gemma4_assistant import Gemma4Assistant, is_assistant
from paceline.heads.mtp import MtpHead, load_mtp
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
        super().__init__(head, target, nodes=nodes, branches=branches, depth=depth, prefix_cache=prefix_cache)


# --- building ---------------------------------------------------------------------------------------------------------


def build(context: DrafterContext) -> Drafter:
    target = checked_target(SPEC.name, context.target, Capability.HIDDEN_STATES)
    name = target.info.name if context.draft_model is None else str(context.draft_model)
    folder = _folder(context, name)
    if is_assistant(folder):
        assistant = Gemma4Assistant.load(folder, dtype=context.head_dtype, device=context.device)
        return AssistantDrafter(assistant, checked_target(SPEC.name, target, Capability.SHARED_KEYS))
    head = load_mtp(folder, name, dtype=context.head_dtype, device=context.device)
    if context.head_in_int8:
        round_linears(head)
    return Mtp(head, target, prefix_cache=context.prefix_cache, **context.options)


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
