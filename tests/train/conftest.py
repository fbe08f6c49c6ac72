"""A tiny target that drafters can learn, and sequences it generated.

target_folder     a Llama that mostly follows a cycle of tokens and strays at random
target_model      that model loaded
sequences_folder  a folder of sequences it generated greedily, as `paceline train --sequences` reuses them
train             train(arguments…) -> exit status and captured output, in this process

Everything runs on one thread: at this size more are slower, and sums are the same in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import cli
from paceline.build import build_engine
from paceline.train.collect import CollectOptions
from paceline.train.corpus import SHARD, Corpus, TrainingSequence
from paceline.train.engine_writer import EngineWriters
from paceline.train.sequence_writer import WriterLimits, answer_plan
from tests.support.tiny import byte_tokenizer, tiny_llama

NUM_SEQS, PROMPT_LEN, SEQ_LEN = 64, 6, 64
USED_TOKENS = 32  # token ids the target ever generates
STRIDE, SHARPNESS = 5, 20.0


def learnable_llama() -> Any:
    """After token t its head prefers t + STRIDE; its random layers disturb the state."""
    model = tiny_llama(3, num_hidden_layers=4, initializer_range=0.1)
    cycle = (torch.arange(USED_TOKENS) + STRIDE) % USED_TOKENS
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[cycle] = SHARPNESS * model.get_input_embeddings().weight[:USED_TOKENS]
    return model


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny"
    learnable_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target_model(target_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(0, USED_TOKENS, (count, PROMPT_LEN), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_writers(model: Any, num_seqs: int = 0) -> EngineWriters:
    """Writers over an engine of this model, for so many sequences of at most 96 tokens at a time."""
    return EngineWriters(build_engine, model, byte_tokenizer(), CollectOptions(max_num_seqs=num_seqs, max_seq_len=96))


def greedy_sequences(model: Any, prompts: list[list[int]], max_len: int) -> list[TrainingSequence]:
    """The target's greedy continuations of these prompts."""
    plans = [answer_plan(prompt, 0.0, max_len, tag) for tag, prompt in enumerate(prompts)]
    writer = engine_writers(model, len(plans)).open(WriterLimits(len(plans), max_len))
    generated = sorted(writer.write(iter(plans), lambda: False), key=lambda seq: seq.plan.tag)
    return [TrainingSequence(seq.tokens, seq.start, greedy=True) for seq in generated]


@pytest.fixture(scope="session")
def sequences_folder(target_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequences")
    Corpus.of(greedy_sequences(target_model, random_prompts(NUM_SEQS), SEQ_LEN)).save(folder / SHARD.format(0))
    return folder


@pytest.fixture
def train(target_folder: Path, sequences_folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(*arguments: object) -> tuple[int, Any]:
        status = cli.main(["train", *(str(argument) for argument in arguments)])
        return status, capsys.readouterr()

    return run


def small_training(target: Path, sequences: Path, steps: int) -> list[object]:
    """The arguments of every small training."""
    data: list[object] = [target, "--sequences", sequences, "--answer-tokens", 100, "--max-seq-len", SEQ_LEN]
    return [*data, "--batch-tokens", 1024, "--steps", steps, "--learning-rate", 0.01, "--eval-every", 1000]
