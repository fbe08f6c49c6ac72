"""What engines offer beyond OpenAI's API: speculation off for one request, a request kept off the prefix cache, and
how many draft tokens were accepted at each position.

An engine is told by what /v1/models says of its owner, or by --engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

NOTHING: Mapping[str, Any] = MappingProxyType({})
UNKNOWN = "other"


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Counters of speculation since the server started: draft tokens at each position, verified and accepted."""

    offered: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()
    mean_tokens_per_step: float | None = None  # where an engine gives nothing finer

    def since(self, before: AcceptanceCounts) -> AcceptanceCounts:
        offered, accepted = _less(self.offered, before.offered), _less(self.accepted, before.accepted)
        return AcceptanceCounts(offered, accepted, self.mean_tokens_per_step)


def _less(now: tuple[float, ...], before: tuple[float, ...]) -> tuple[float, ...]:
    earlier = (*before, *(0.0 for _ in now))
    return tuple(new - old for new, old in zip(now, earlier))


ReadCounts = Callable[[str], AcceptanceCounts | None]


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Fields and documents of one engine.

    owner        what /v1/models says in owned_by
    off          fields that turn speculation off for one request
    report       fields that make an answer say how many draft tokens were verified
    cold         the field that keeps a request off the prefix cache, and whether its value is a name of its own
    counts_path  where the acceptance counters are, and how they are read
    """

    name: str
    owner: str = ""
    off: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    cold_field: str = ""
    cold_value: Any = None
    counts_path: str = ""
    read_counts: ReadCounts | None = None

    def cold(self, salt: str) -> Mapping[str, Any]:
        """Fields of a request that must find nothing in the prefix cache; empty where there are none."""
        if not self.cold_field:
            return NOTHING
        return {self.cold_field: salt if self.cold_value is None else self.cold_value}


def _samples(text: str, name: str) -> dict[str, float]:
    """The samples of one Prometheus metric, summed by their label `position`."""
    values: dict[str, float] = {}
    for labels, number in re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)", text, re.MULTILINE):
        position = re.search(r'position="(\w+)"', labels)
        key = position[1] if position else ""
        values[key] = values.get(key, 0.0) + float(number)
    return values


def _prometheus(offered: str, accepted: str) -> ReadCounts:
    """offered: draft tokens verified at each position, or drafts, where every draft has all positions."""

    def read(text: str) -> AcceptanceCounts | None:
        drafts, positions = _samples(text, offered), _samples(text, accepted)
        if not drafts or not positions:
            return None
        keys = sorted(positions, key=int)
        return AcceptanceCounts(
            tuple(drafts.get(key, drafts.get("", 0.0)) for key in keys), tuple(positions[key] for key in keys)
        )

    return read


def _sglang(text: str) -> AcceptanceCounts | None:
    """/get_server_info gives the mean number of tokens a step."""
    try:
        states = json.loads(text).get("internal_states") or [{}]
    except (ValueError, AttributeError):
        return None
    length = states[0].get("avg_spec_accept_length")
    return None if length is None else AcceptanceCounts(mean_tokens_per_step=float(length))


ENGINES = {
    engine.name: engine
    for engine in (
        EngineTraits(
            "paceline", "paceline", off={"speculative": {"num_draft_tokens": 0}}, report={"x_paceline": True},
            counts_path="/metrics",
            read_counts=_prometheus(
                "paceline_spec_draft_tokens_per_position_total", "paceline_spec_accepted_tokens_per_position_total"
            ),
        ),
        EngineTraits(
            "vllm", "vllm", cold_field="cache_salt", counts_path="/metrics",
            read_counts=_prometheus(
                "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            ),
        ),
        EngineTraits("sglang", "sglang", counts_path="/get_server_info", read_counts=_sglang),
        EngineTraits("llama.cpp", "llamacpp", cold_field="cache_prompt", cold_value=False),
        EngineTraits(UNKNOWN),
    )
}  # fmt: skip


def engine_of(owner: str) -> EngineTraits:
    """The engine whose server names this owner."""
    return next((engine for engine in ENGINES.values() if owner and engine.owner == owner), ENGINES[UNKNOWN])
