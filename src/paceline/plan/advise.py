"""From a situation to one recommendation: what to do, why, and the command to run.

Two questions lead to six situations. The walk itself is data (`first_question`), so the command line may ask, and a
program that already knows the answers may skip them with `situation_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from paceline.plan.catalogue import find_model
from paceline.plan.hardware import Card, CardKind
from paceline.plan.pairs import Pair, pairs_for


class Situation(Enum):
    """Where people stand when they ask."""

    SINGLE_GPU = "single-gpu"
    MANY_GPUS = "many-gpus"
    NO_DRAFT = "no-draft"
    CPU = "cpu"
    APPLE = "apple"
    API = "api"


@dataclass(frozen=True, slots=True)
class Question:
    """One fork of the walk. An answer leads to another question or to a situation."""

    text: str
    answers: Mapping[str, Question | Situation]


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation, and the commands that carry it out in order."""

    situation: Situation
    title: str
    why: str
    commands: tuple[str, ...]


def first_question() -> Question:
    """The beginning of the walk."""
    draft = Question(
        "Is there a much smaller model with the same tokenizer? (`paceline pairs` lists them)",
        {"yes": Situation.SINGLE_GPU, "no": Situation.NO_DRAFT},
    )
    return Question(
        "Where does the large model run?",
        {
            "one GPU": draft,
            "several GPUs": Situation.MANY_GPUS,
            "Apple Silicon": Situation.APPLE,
            "CPU": Situation.CPU,
            "only an API": Situation.API,
        },
    )


def situation_of(card: Card | None, gpus: int, target: str | None) -> Situation:
    """The situation that follows from what was already said on the command line."""
    if card is not None and card.kind is CardKind.APPLE:
        return Situation.APPLE
    if card is not None and card.kind is CardKind.CPU:
        return Situation.CPU
    if gpus > 1:
        return Situation.MANY_GPUS
    return Situation.NO_DRAFT if target is not None and _draft_pair(target) is None else Situation.SINGLE_GPU


def advise(situation: Situation, target: str | None = None) -> Advice:
    """The recommendation for a situation, with the commands filled in for this target where it is known."""
    makers = {
        Situation.SINGLE_GPU: _single_gpu,
        Situation.MANY_GPUS: _many_gpus,
        Situation.NO_DRAFT: _no_draft,
        Situation.CPU: _cpu,
        Situation.APPLE: _apple,
        Situation.API: _api,
    }
    return makers[situation](_Commands(target))


class _Commands:
    """Command lines for one target: the user's, or an example where none was named."""

    def __init__(self, target: str | None) -> None:
        self._named = target or "llama-3.1-8b"
        entry = find_model(self._named)
        self.target = entry.runnable_name if entry else self._named
        self._pair = _draft_pair(self._named)

    @property
    def draft_options(self) -> str:
        """--draft and --method, from the pairs; n-grams where no pair is known."""
        if self._pair is None or self._pair.draft is None:
            return "--method ngram"
        return f"--draft {self._pair.draft.runnable_name} --method draft"

    def __call__(self, word: str, options: str = "") -> str:
        return f"paceline {word} --target {self.target} {options}".rstrip()


def _draft_pair(target: str) -> Pair | None:
    with_draft = [pair for pair in pairs_for(target) if pair.draft is not None and not pair.is_warning]
    return with_draft[0] if with_draft else None


def _single_gpu(run: _Commands) -> Advice:
    return Advice(
        Situation.SINGLE_GPU,
        "A draft model of the same family beside the target",
        "One text on one GPU is bound by reading the weights, so verifying five tokens costs little more than one. "
        "A draft of a tenth of the size or less with the same tokenizer usually has 55% to 80% of its guesses kept.",
        (
            run("plan", run.draft_options),
            run("tune", run.draft_options),
            run("generate", f"{run.draft_options} -k auto"),
        ),
    )


def _many_gpus(run: _Commands) -> Advice:
    return Advice(
        Situation.MANY_GPUS,
        "Divide the target, keep the draft whole on one GPU, and let the load choose k",
        "A pass over several GPUs is slow and fixed, which makes guesses worth more; the draft must not be divided, or "
        "its small passes wait on the wires. With many users the GPUs are busy anyway, so k must fall with the load.",
        (run("plan", f"{run.draft_options} --gpus 2"), run("serve", f"{run.draft_options} -k auto")),
    )


def _no_draft(run: _Commands) -> Advice:
    return Advice(
        Situation.NO_DRAFT,
        "Guess from the text itself now; train a head for this model when it is worth a night",
        "N-grams cost no memory and no training, and pay where the answer repeats the prompt: edits, summaries, code. "
        "An EAGLE head trained on what the model itself writes guesses everywhere, for about the size of one layer.",
        (
            run("generate", "--method ngram -k auto"),
            run("train eagle", "--out my-head"),
            run("generate", "--method eagle --draft my-head -k auto"),
        ),
    )


def _cpu(run: _Commands) -> Advice:
    return Advice(
        Situation.CPU,
        "Measure first: on a CPU guessing often does not pay",
        "A CPU runs out of arithmetic long before a GPU does, so verifying eight tokens can cost six times one. It "
        "pays where width is cheap: int8 weights, and guesses that are nearly free. `tune` says so when it does not.",
        (run("tune", "--dtype int8 --method ngram"), run("generate", "--dtype int8 --method ngram -k auto")),
    )


def _apple(run: _Commands) -> Advice:
    return Advice(
        Situation.APPLE,
        "A very small draft and few guesses; mind the shared memory",
        "Memory is plentiful and its bandwidth modest, so a large target gains; but these GPUs have little arithmetic "
        "to spare, and a 3B draft with 16 guesses has been seen to gain nothing. Half a billion weights, k = 3 to 5.",
        (run("plan", f"{run.draft_options} --card m4-max"), run("tune", run.draft_options)),
    )


def _api(run: _Commands) -> Advice:
    return Advice(
        Situation.API,
        "Speculation happens where the weights are; from outside you can only bring guesses, and check",
        "A provider's model cannot be sped up from this side. Where the API takes predicted outputs, send the text you "
        "expect (the file being edited). Whether two endpoints answer alike can be audited. Your own server does all.",
        (
            "paceline audit --endpoint URL --against OTHER_URL",
            run("serve", f"{run.draft_options} -k auto"),
        ),
    )
