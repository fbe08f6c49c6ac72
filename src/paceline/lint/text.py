"""The text a head is read on: answers that the target writes through the engine, or a file."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.workloads import WorkloadPrompt, load_prompts
from paceline.errors import OptionError
from paceline.hub.tokenizer import Tokenizer
from paceline.train.collect import CollectOptions
from paceline.train.corpus import TrainingSequence
from paceline.train.engine_writer import BuildEngine, EngineWriters
from paceline.train.sequence_writer import WriterLimits, answer_plan
from paceline.train.task import TrainingTarget

ANSWER_TOKENS = 160  # of one answer, at most
LONGEST_PROMPT = 192
PIECE = 256  # tokens of a file that are read as one sequence


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """A prompt of the built-in set and the target's greedy answer to it."""

    prompt: WorkloadPrompt
    seq: TrainingSequence

    @property
    def num_tokens(self) -> int:
        return len(self.seq.tokens) - self.seq.start


def written_answers(target: TrainingTarget, build: BuildEngine, num_tokens: int, seed: int = 0) -> list[WrittenAnswer]:
    """About so many tokens that the target writes. seed: chooses the prompts."""
    tokenizer = Tokenizer(target.tokenizer)
    encoded = [(prompt, prompt.encode(tokenizer)) for prompt in _prompts(seed)]
    usable = [(prompt, ids) for prompt, ids in encoded if len(ids) <= LONGEST_PROMPT]
    max_len = LONGEST_PROMPT + ANSWER_TOKENS
    writers = EngineWriters(build, target.model, target.tokenizer, CollectOptions(max_seq_len=max_len))
    answers: list[WrittenAnswer] = []
    while usable and (missing := num_tokens - sum(answer.num_tokens for answer in answers)) > 0:
        count = -(-missing // ANSWER_TOKENS)
        batch, usable = usable[:count], usable[count:]
        plans = [answer_plan(ids, 0.0, len(ids) + ANSWER_TOKENS, tag) for tag, (_, ids) in enumerate(batch)]
        generated = writers.open(WriterLimits(len(plans), max_len)).write(iter(plans), lambda: False)
        for seq in sorted(generated, key=lambda seq: seq.plan.tag):
            answers.append(WrittenAnswer(batch[seq.plan.tag][0], TrainingSequence(seq.tokens, seq.start, greedy=True)))
    return answers


def _prompts(seed: int) -> list[WorkloadPrompt]:
    prompts = load_prompts("builtin")
    random.Random(seed).shuffle(prompts)
    return prompts


def file_text(path: str, tokenizer: Tokenizer, num_tokens: int) -> list[TrainingSequence]:
    """The first tokens of a text file, in pieces. Raises OptionError where it cannot be read or is empty."""
    try:
        content = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the text file {path} cannot be read: {error}") from error
    tokens = tokenizer.encode(content)[:num_tokens] if content.strip() else []
    pieces = [tokens[start : start + PIECE] for start in range(0, len(tokens), PIECE)]
    seqs = [TrainingSequence(piece, 1) for piece in pieces if len(piece) > PIECE // 4]
    if not seqs:
        raise OptionError(f"the text file {path} is too short; {PIECE} tokens or more are needed")
    return seqs


def without_template(answers: list[WrittenAnswer], tokenizer: Tokenizer) -> list[TrainingSequence]:
    """The answers of chat prompts after the bare text of their prompts."""
    seqs = []
    for answer in answers:
        prompt = tokenizer.encode(answer.prompt.text + "\n\n")
        seqs.append(TrainingSequence([*prompt, *answer.seq.tokens[answer.seq.start :]], len(prompt), greedy=True))
    return seqs
