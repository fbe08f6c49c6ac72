"""The one definition of every rate that is ever printed.

steps            passes of the target that emitted tokens (one a sequence and step)
drafted          draft tokens that the target verified. Neither probes nor draft tokens past the end count
accepted         draft tokens that became part of the sequence
acceptance_rate  accepted / drafted
tokens_per_step  τ = 1 + accepted / steps; with plain decoding exactly 1
by position      at depth d: how often a draft token at that depth was accepted, of the steps that drafted one there
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.draft_tree import DraftTree, depths


@dataclass(slots=True)
class SpecStats:
    """Counts of one sequence, or of many added up."""

    new_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    offered_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add_step(self, tree: DraftTree, accepted: int, emitted: int, cut: bool) -> None:
        """Count one step of one sequence. `cut`: the sequence ended inside the accepted run, after `emitted` tokens."""
        drafted = reach = tree.num_draft_tokens
        if cut or not tree.is_chain:
            offered = depths(tree.parents[:drafted])
            if cut:  # draft tokens past the end count neither as accepted nor as rejected
                offered = [depth for depth in offered if depth < emitted]
            drafted, reach = len(offered), max(offered, default=-1) + 1
        self.steps += 1
        self.new_tokens += emitted
        self.drafted += drafted
        self.accepted += accepted
        self._widen(max(reach, accepted))
        for depth in range(reach):
            self.offered_at[depth] += 1
        for depth in range(accepted):
            self.accepted_at[depth] += 1

    def add_plain(self, steps: int) -> None:
        """Count steps without drafts, which emit one token each."""
        self.steps += steps
        self.new_tokens += steps

    def add(self, other: SpecStats) -> None:
        """Add the counts of another; seconds add up too, so time a batch once and set it on the sum.

        The other may be counting meanwhile, in another thread.
        """
        self.new_tokens += other.new_tokens
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.seconds += other.seconds
        offered_at, accepted_at = list(other.offered_at), list(other.accepted_at)
        self._widen(max(len(offered_at), len(accepted_at)))
        for depth, count in enumerate(offered_at):
            self.offered_at[depth] += count
        for depth, count in enumerate(accepted_at):
            self.accepted_at[depth] += count

    def _widen(self, size: int) -> None:
        missing = size - len(self.offered_at)
        if missing > 0:
            self.offered_at += [0] * missing
            self.accepted_at += [0] * missing

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        return 1.0 + self.accepted / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        return [accepted / offered if offered else 0.0 for accepted, offered in zip(self.accepted_at, self.offered_at)]

    def as_dict(self) -> dict[str, object]:
        """The fields every report and JSON document uses."""
        return {
            "new_tokens": self.new_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_step": self.tokens_per_step,
            "acceptance_by_position": self.acceptance_by_position,
        }


@dataclass(frozen=True, slots=True)
class LearningStats:
    """What a head that learns from traffic has done.

    acceptance  share of first draft tokens accepted in the latest sequences
    head        number of the head in use; 0: the one that was given
    attempts    trainings that were finished
    """

    ring_bytes: int = 0
    ring_seqs: int = 0
    acceptance: float = 0.0
    head: int = 0
    attempts: int = 0
    swaps: int = 0
    rollbacks: int = 0


@dataclass(slots=True)
class EngineStats:
    """A snapshot of an engine. The first group is of now; counts only ever rise."""

    waiting: int = 0
    running: int = 0
    blocks_used: int = 0  # by running sequences
    blocks_cached: int = 0  # by the prefix cache; evicted when needed
    blocks_free: int = 0

    spec: SpecStats = field(default_factory=SpecStats)
    by_method: dict[str, SpecStats] = field(default_factory=dict)
    prefix_hits: int = 0
    prefix_tokens: int = 0
    preemptions: int = 0
    failures: int = 0  # steps that raised
    restarts: int = 0  # of the engine, after its worker has died
    prompt_tokens: int = 0
    draft_lengths: dict[int, int] = field(default_factory=dict)  # steps of one sequence, by their num_draft_tokens
    learning: LearningStats | None = None  # where the drafter's head learns from traffic
