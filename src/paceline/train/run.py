"""One training from a target's name to a drafter on disk: texts, a task, the loop, the files.

OUT/                    the drafter, its card README.md and curve.png, and other layouts in folders below
OUT/texts/              what the target wrote, or what came of --data; found again by a second run
OUT/training/           options.json, checkpoint.pt and log.jsonl; what --resume goes on from
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.hub import locate
from paceline.hub.tokenizer import load_tokenizer
from paceline.runners.loading import eos_token_ids_of, load_model
from paceline.train import distributed
from paceline.train.atomic import write_text
from paceline.train.collect import CollectOptions, Progress, collect, loaded
from paceline.train.corpus import Batches, Corpus, Split, frequent_tokens, split
from paceline.train.data import collect_from
from paceline.train.loop import CHECKPOINT, History, Loop, LoopOptions, TrainingProgress
from paceline.train.report import CURVE, Facts, plot, write_card
from paceline.train.task import Task
from paceline.train.teacher import Teacher, precision

TRAINING, TEXTS, OPTIONS = "training", "texts", "options.json"
PLACES = ("out", "texts", "data", "device")  # options that say where, not what: no part of the card
SHAPES = {
    "eagle": ("width", "vocabulary", "unroll"),
    "medusa": ("layers", "vocabulary", "heads"),
    "draft": ("layers", "width", "vocabulary"),
    "exit": ("layer", "width"),
}
WITHOUT_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is done where the user does not say."""

    tokens: int
    steps: int
    batch_tokens: int
    measure_every: int


ON_GPU = Amounts(4_000_000, 4000, 16384, 250)
ON_CPU = Amounts(100_000, 1000, 2048, 50)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """All that a user may choose about a training. 0 stands for the usual amount, on this device and for this word.

    word      eagle, medusa, draft or exit
    tokens    answer tokens the target writes; write_minutes: it stops after so long
    longest   tokens of a text, at most; rows: texts written at a time
    steps     of training; minutes: it stops after so long
    layers    of a draft model, or residual parts of a Medusa head
    width     of a draft model, of an exit's bottleneck, of an EAGLE head's feed-forward part
    layer     an exit lies after it; heads: of Medusa; unroll: drafting steps an EAGLE head is trained over
    greedy    share of the loss that looks only at the target's likeliest token
    """

    word: str
    out: str
    target: str = "default"
    data: str | None = None
    texts: str | None = None
    tokens: int = 0
    write_minutes: float = 0.0
    longest: int = 1152
    rows: int = 0
    steps: int = 0
    minutes: float = 0.0
    batch_tokens: int = 0
    rate: float = 1e-3
    save_every: int = 250
    measure_every: int = 0
    seed: int = 0
    device: str | None = None
    layers: int = 0
    width: int = 0
    vocabulary: int = 0
    layer: int = 0
    heads: int = 0
    unroll: int = 0
    greedy: float = 0.5

    def __post_init__(self) -> None:
        if self.word not in SHAPES:
            raise OptionError(f"a training is one of {', '.join(SHAPES)}; not {self.word!r}")
        for name in {name for names in SHAPES.values() for name in names} - set(SHAPES[self.word]):
            if getattr(self, name):
                raise OptionError(f"--{name} is not for {self.word}; it takes --{', --'.join(SHAPES[self.word])}")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, int | float) and value < 0:
                raise OptionError(f"--{entry.name.replace('_', '-')} cannot be {value}")

    @property
    def folder(self) -> Path:
        return Path(self.out).expanduser()

    @property
    def texts_folder(self) -> Path:
        return Path(self.texts).expanduser() if self.texts else self.folder / TEXTS

    @property
    def begun(self) -> bool:
        """There is a checkpoint to go on from."""
        return (self.folder / TRAINING / CHECKPOINT).is_file()

    def usual(self, device: str) -> TrainOptions:
        """The same with every amount filled in."""
        amounts = ON_GPU if device.startswith("cuda") else ON_CPU
        steps = self.steps or (WITHOUT_LIMIT if self.minutes else amounts.steps)
        sizes = {name: getattr(self, name) or getattr(amounts, name) for name in ("tokens", "batch_tokens")}
        every = self.measure_every or (amounts.measure_every if steps == WITHOUT_LIMIT else max(1, steps // 20))
        return replace(self, steps=steps, measure_every=min(every, amounts.measure_every), **sizes)

    def collecting(self) -> CollectOptions:
        seconds = 60 * self.write_minutes or float("inf")
        return CollectOptions(self.tokens, seconds, self.rows, self.longest, self.seed)

    def looping(self) -> LoopOptions:
        return LoopOptions(
            self.steps,
            60 * self.minutes or float("inf"),
            self.batch_tokens,
            self.rate,
            save_every=self.save_every,
            measure_every=self.measure_every,
            seed=self.seed,
        )


def recorded(out: str) -> dict[str, Any]:
    """The options of the training in a folder. Raises OptionError where there is none."""
    path = Path(out).expanduser() / TRAINING / OPTIONS
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(f"{out} holds no training to resume; start one without --resume") from None
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} cannot be read ({error}); start the training without --resume") from error
    known = {entry.name for entry in fields(TrainOptions)}
    return {name: value for name, value in found.items() if name in known}


class Observer(Protocol):
    """Whoever shows a training."""

    def stage(self, text: str) -> None:
        """Something else begins."""

    def writing(self, progress: Progress) -> None:
        """The target has finished a text."""

    def step(self, moment: TrainingProgress) -> None:
        """A step of the training is done."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A loaded target and what is around it."""

    name: str
    model: Any
    tokenizer: Any
    teacher: Teacher


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a training."""

    options: TrainOptions
    history: History
    texts: int
    answer_tokens: int
    parameters: int
    files: list[str] = field(default_factory=list)


def train(options: TrainOptions, device: str, observer: Observer, *, resume: bool = False) -> Trained:
    """Train one drafter to the end and write it. Raises PacelineError for whatever the user can put right."""
    device = distributed.join(device)
    options = options.usual(device)
    torch.manual_seed(options.seed)
    if distributed.share().first:
        if not resume:  # or a later --resume would go on from what was to be forgotten
            (options.folder / TRAINING / CHECKPOINT).unlink(missing_ok=True)
        write_text(options.folder / TRAINING / OPTIONS, json.dumps(asdict(options), indent=1) + "\n")
    observer.stage(f"loading {options.target}")
    target = open_target(options, device)
    corpus = texts_of(options, target, observer, resume and options.begun)
    parts = split(corpus, options.seed)
    torch.manual_seed(options.seed)  # however the texts came, first weights are the same
    task = TASKS[options.word](options, target, parts)
    sample = next(Batches(parts.train, options.batch_tokens, options.seed).once())
    task.start(sample.to(target.teacher.device))
    observer.stage(f"training {options.word} on {len(parts.train)} texts, {len(parts.held_out)} held out")
    loop = Loop(task, parts, options.folder / TRAINING, options.looping(), observer.step)
    history = loop.run(resume)
    size = sum(weight.numel() for weight in task.module.parameters() if weight.requires_grad)
    result = Trained(options, history, len(corpus), corpus.answer_tokens, size)
    return replace(result, files=write(result, task, target)) if distributed.share().first else result


def open_target(options: TrainOptions, device: str) -> Target:
    files = locate(options.target)
    model = load_model(files.folder, files.name, precision(device), device)
    name = files.folder.name if options.target == "default" else options.target.rstrip("/").rsplit("/", 1)[-1]
    return Target(name, model, load_tokenizer(files.folder, files.name), Teacher(model))


def texts_of(options: TrainOptions, target: Target, observer: Observer, resume: bool) -> Corpus:
    """What there is to learn from. A training that has begun goes on with exactly the texts it began with."""
    folder, wanted = options.texts_folder, options.collecting()
    if not resume and distributed.share().first:
        if options.data:
            observer.stage(f"reading {Path(options.data).name}; the target answers its questions")
            path = Path(options.data).expanduser()
            collect_from(path, target.model, target.tokenizer, folder, wanted, observer.writing)
        else:
            observer.stage(f"{target.name} writes texts to learn from")
            collect(target.model, target.tokenizer, folder, wanted, observer.writing)
    distributed.wait()
    return Corpus.joined(loaded(folder)).cut(options.longest).without_repeats()


# --- tasks ------------------------------------------------------------------------------------------------------------


def _vocabulary(options: TrainOptions, target: Target, parts: Split, usual: int) -> Tensor:
    """The tokens a head can say: those seen most often."""
    count = options.vocabulary or usual
    return frequent_tokens(parts.train, target.teacher.vocab_size, count, eos_token_ids_of(target.model))


def _eagle(options: TrainOptions, target: Target, parts: Split) -> Task:
    from paceline.train.eagle import EagleOptions, EagleTask

    usual = EagleOptions()
    vocabulary = _vocabulary(options, target, parts, usual.vocabulary)
    size = int(vocabulary.shape[0])
    chosen = EagleOptions(size, options.width, options.unroll or usual.steps, usual.fading, options.greedy)
    return EagleTask(target.teacher, vocabulary, chosen, target.name)


def _medusa(options: TrainOptions, target: Target, parts: Split) -> Task:
    from paceline.train.medusa import MedusaOptions, MedusaTask

    usual = MedusaOptions()
    chosen = MedusaOptions(options.heads or usual.heads, options.layers or usual.layers, usual.fading, options.greedy)
    return MedusaTask(
        target.teacher, _vocabulary(options, target, parts, target.teacher.vocab_size), chosen, target.name
    )


def _draft(options: TrainOptions, target: Target, parts: Split) -> Task:
    from paceline.train.draft import DraftOptions, DraftTask

    usual = DraftOptions()
    sizes = (options.layers or usual.layers, options.width or usual.width, options.vocabulary)
    return DraftTask(target.teacher, target.tokenizer, DraftOptions(*sizes, options.greedy))


def _exit(options: TrainOptions, target: Target, parts: Split) -> Task:
    from paceline.train.exit_adapter import ExitOptions, ExitTask

    return ExitTask(target.teacher, ExitOptions(options.layer, options.width, options.greedy), target.name)


TASKS: dict[str, Callable[[TrainOptions, Target, Split], Task]] = {
    "eagle": _eagle,
    "medusa": _medusa,
    "draft": _draft,
    "exit": _exit,
}


# --- files ------------------------------------------------------------------------------------------------------------


def write(result: Trained, task: Task, target: Target) -> list[str]:
    """The drafter, its card and its curve. Returns the files' names."""
    folder = result.options.folder
    task.export(folder)
    settings = {name: value for name, value in asdict(result.options).items() if name not in PLACES}
    facts = Facts(result.options.word, target.name, _told(result), result.parameters, settings, {})
    write_card(folder, facts, result.history)
    plot(result.history, folder / CURVE)
    skipped = {TRAINING, TEXTS}
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [str(path) for path in paths if path.parts[0] not in skipped]


def _told(result: Trained) -> str:
    """The card's sentence about the data."""
    amount = f"{result.texts} texts with {result.answer_tokens} tokens of answers"
    if result.options.data:
        return f"{amount}, from {Path(result.options.data).name}; open questions were answered by the target."
    return (
        f"{amount} that the target wrote itself: questions it invented after short openings, answered greedily and at "
        f"temperatures 0.5 to 1. No data set was used."
    )
