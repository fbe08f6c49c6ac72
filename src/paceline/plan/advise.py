"""From a situation to one recommendation: what to do, why, and the command to run.

Two questions lead to six situations. The questions are data (`first_question`), so the command line can ask them, and
a program that has the answers can skip them with `situation_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from paceline.plan.catalogue import find_model
from paceline.plan.hardware import Accelerator, AcceleratorKind
from paceline.plan.pairs import ModelPair, runnable_pairs
from paceline.plan.support import NATIVE, Support


class Situation(Enum):
    """The hardware and models a user starts from."""

    SINGLE_GPU = "single-gpu"
    MANY_GPUS = "many-gpus"
    NO_DRAFT = "no-draft"
    CPU = "cpu"
    APPLE = "apple"
    API = "api"


@dataclass(frozen=True, slots=True)
class Question:
    """One question. An answer leads to another question or to a situation."""

    text: str
    answers: Mapping[str, Question | Situation]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommendation, and the commands that carry it out in order."""

    situation: Situation
    title: str
    why: str
    commands: tuple[str, ...]


def first_question() -> Question:
    """The first of the questions."""
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


def situation_of(accelerator: Accelerator | None, num_gpus: int, target: str | None, support: Support) -> Situation:
    """The situation that follows from the options of the command line."""
    if accelerator is not None and accelerator.kind is AcceleratorKind.APPLE:
        return Situation.APPLE
    if accelerator is not None and accelerator.kind is AcceleratorKind.CPU:
        return Situation.CPU
    if num_gpus > 1:
        return Situation.MANY_GPUS
    return Situation.NO_DRAFT if target is not None and _draft_pair(target, support) is None else Situation.SINGLE_GPU


def advise(situation: Situation, target: str | None, support: Support) -> Recommendation:
    """The recommendation for a situation, with the commands filled in for this target where it is known.

    support: what can be run here; nothing else is recommended.
    """
    makers = {
        Situation.SINGLE_GPU: _single_gpu,
        Situation.MANY_GPUS: _many_gpus,
        Situation.NO_DRAFT: _no_draft,
        Situation.CPU: _cpu,
        Situation.APPLE: _apple,
        Situation.API: _api,
    }
    return makers[situation](_Commands(target, support))


class _Commands:
    """Command lines for one target: the user's, or an example where none was named."""

    def __init__(self, target: str | None, support: Support) -> None:
        name = target or "llama-3.1-8b"
        entry = find_model(name)
        self.support = support
        self._target = entry.runnable_name if entry else name
        self._pair = _draft_pair(name, support)
        self.takes_int8 = entry is None or support.runner_of(entry.sizes) == NATIVE

    @property
    def draft_options(self) -> str:
        """--draft-model from the catalogue of pairs; n-grams where it lists no pair."""
        if self._pair is None or self._pair.draft is None:
            return "--method ngram"
        return f"--draft-model {self._pair.draft.runnable_name}"

    @property
    def tune_options(self) -> str:
        """The same for `tune`, which tries several methods."""
        return self.draft_options.replace("--method ", "--methods ")

    def __call__(self, command: str, options: str = "") -> str:
        return f"paceline {command} {self._target} {options}".rstrip()


def _draft_pair(target: str, support: Support) -> ModelPair | None:
    with_draft = [pair for pair in runnable_pairs(target, support) if pair.draft is not None and not pair.is_warning]
    return with_draft[0] if with_draft else None


def _single_gpu(run: _Commands) -> Recommendation:
    return Recommendation(
        Situation.SINGLE_GPU,
        "A draft model of the same family beside the target",
        "One sequence on one GPU is limited by reading the weights, so verifying five tokens costs little more than "
        "one. Of a draft model a tenth of the size with the same tokenizer, 55% to 80% of the tokens are accepted.",
        (
            run("plan", run.draft_options),
            run("tune", run.tune_options),
            run("serve", run.draft_options),
        ),
    )


def _many_gpus(run: _Commands) -> Recommendation:
    engine = run.support.engine(num_gpus=2)
    return _one_server_a_gpu(run) if engine is None else _divided(run, engine.name)


def _one_server_a_gpu(run: _Commands) -> Recommendation:
    engines = ", ".join(engine.name for engine in run.support.engines)
    serve = run("serve", f"{run.draft_options} --device cuda:{{0}} --port 800{{0}}")
    return Recommendation(
        Situation.MANY_GPUS,
        "One server on each GPU, behind a load balancer",
        f"No engine that is installed ({engines}) divides a model over GPUs: each GPU holds the whole model, and "
        "`plan` says whether it fits on one. Servers side by side answer more requests, none of them sooner.",
        (run("plan", run.draft_options), serve.format(0), serve.format(1)),
    )


def _divided(run: _Commands, engine: str) -> Recommendation:
    return Recommendation(
        Situation.MANY_GPUS,
        "Divide the target, keep the draft whole on one GPU, and let the load choose the number of draft tokens",
        "A pass over several GPUs is slow and fixed, so draft tokens are worth more; the draft must not be divided, or "
        "its small passes wait for the interconnect. With many users the GPUs are busy, so k must fall with the load.",
        (
            run("plan", f"{run.draft_options} --num-gpus 2"),
            run("serve", f"{run.draft_options} --engine {engine} -k auto"),
        ),
    )


def _no_draft(run: _Commands) -> Recommendation:
    return Recommendation(
        Situation.NO_DRAFT,
        "Draft from the sequence itself now; train a head for this model when it is worth a night",
        "N-grams cost no memory and no training, and pay where the answer repeats the prompt: edits, summaries, code. "
        "An EAGLE head trained on the model's own output drafts everywhere, for about the size of one layer.",
        (
            run("serve", "--method ngram"),
            run("train eagle", "--out my-head"),
            run("serve", "--method eagle --draft-model my-head"),
        ),
    )


def _cpu(run: _Commands) -> Recommendation:
    options = "--dtype int8 --method ngram" if run.takes_int8 else "--method ngram"
    return Recommendation(
        Situation.CPU,
        "Measure first: on a CPU speculation often does not pay",
        "A CPU runs out of arithmetic long before a GPU does, so verifying eight tokens can cost six times one. It "
        "pays where wide passes are cheap: int8 weights, and drafts that are nearly free. `tune` measures it.",
        (run("tune", options.replace("--method", "--methods")), run("serve", options)),
    )


def _apple(run: _Commands) -> Recommendation:
    return Recommendation(
        Situation.APPLE,
        "A very small draft model and few draft tokens; mind the shared memory",
        "Memory is plentiful and its bandwidth modest, so a large target gains; but these GPUs have little arithmetic "
        "to spare, and a 3B draft with 16 draft tokens gained nothing. Half a billion weights, k = 3 to 5.",
        (run("plan", f"{run.draft_options} --hardware m4-max"), run("tune", run.tune_options)),
    )


def _api(run: _Commands) -> Recommendation:
    return Recommendation(
        Situation.API,
        "Speculation happens where the weights are; a client can only send a predicted output, and audit",
        "A provider's model cannot be made faster by its client. Where the API takes predicted outputs, send the text "
        "you expect (the file being edited). `audit` tests whether two endpoints answer alike.",
        (
            "paceline audit --endpoint URL --against OTHER_URL",
            run("serve", run.draft_options),
        ),
    )
