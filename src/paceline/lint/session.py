"""One call of `paceline check --head`: the target, its text, the readings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import OptionError
from paceline.heads.checkpoint import Checkpoint
from paceline.hub import locate
from paceline.hub.tokenizer import Tokenizer, load_tokenizer
from paceline.lint.comparison import paired
from paceline.lint.report import TemplateNote
from paceline.lint.run import acceptance
from paceline.lint.target import StatedText, stated
from paceline.lint.text import WrittenAnswer, file_text, without_template, written_answers
from paceline.runners.loading import load_model
from paceline.train.engine_writer import BuildEngine
from paceline.train.placement import target_dtype
from paceline.train.task import TrainingTarget
from paceline.train.teacher import Teacher

FEWEST_TOKENS = 256
TEMPLATE_ANSWERS = 4  # answers that are read once more without the chat template


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Which text a head is read on. path: a file; None: the target writes it."""

    num_tokens: int = 2000
    path: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens < FEWEST_TOKENS:
            raise OptionError(f"--tokens must be {FEWEST_TOKENS} or more: fewer tell no readings apart")


@dataclass(frozen=True, slots=True, eq=False)
class LintText:
    """The text with its states; answers: empty where it came from a file."""

    stated: StatedText
    answers: list[WrittenAnswer]
    origin: str


def open_target(model: str, device: str) -> TrainingTarget:
    """The target as training loads it."""
    files = locate(model)
    loaded: Any = load_model(files.folder, files.name, target_dtype(device), device)
    return TrainingTarget(files.name, loaded, load_tokenizer(files.folder, files.name), Teacher(loaded))


Stage = Callable[[str], None]  # shows what is being done


def lint_text(target: TrainingTarget, build: BuildEngine, options: TextOptions, stage: Stage) -> LintText:
    """The text a head is read on, with the target's states over it."""
    if options.path is not None:
        seqs = file_text(options.path, Tokenizer(target.tokenizer), options.num_tokens)
        answers, origin = list[WrittenAnswer](), options.path
    else:
        stage(f"{target.name} writes about {options.num_tokens} tokens")
        answers = written_answers(target, build, options.num_tokens, options.seed)
        seqs, origin = [answer.seq for answer in answers], f"written by {target.name}"
    stage("the target's states over the text")
    return LintText(stated(target.teacher, seqs), answers, origin)


def template_note(target: TrainingTarget, files: Checkpoint, text: LintText) -> TemplateNote | None:
    """Whether the head drafts better without the chat template; None where the text has none."""
    chosen = [index for index, answer in enumerate(text.answers) if answer.prompt.chat][:TEMPLATE_ANSWERS]
    if not chosen or not target.tokenizer.chat_template:
        return None
    bare = without_template([text.answers[index] for index in chosen], Tokenizer(target.tokenizer))
    templated = acceptance(files, text.stated.seqs(chosen))
    without = acceptance(files, stated(target.teacher, bare))
    return TemplateNote(templated.by_position[0], without.by_position[0], paired(without, templated))
