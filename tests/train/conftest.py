"""A tiny target worth learning from, and texts it wrote.

target_folder   a Llama that mostly goes round in a circle of tokens and strays at random: drafters can learn it
target_model    that model loaded
texts_folder    a folder of texts it wrote greedily, as `paceline train --texts` finds them
train           train(words…) -> exit status and what was printed, in this process

Everything runs on one thread: at this size more are slower, and sums come out the same in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import cli
from paceline.runners.loading import eos_token_ids_of
from paceline.train.batch_generator import Plan, Writer
from paceline.train.corpus import SHARD, Corpus, Text
from tests.support.tiny import byte_tokenizer, tiny_llama

TEXTS, PROMPT, LENGTH = 64, 6, 64
SPOKEN = 32  # tokens the target ever says
STRIDE, SHARPNESS = 5, 20.0


def learnable_llama() -> Any:
    """After token t its head hears t + STRIDE; its random layers disturb what it hears."""
    model = tiny_llama(3, num_hidden_layers=4, initializer_range=0.1)
    circle = (torch.arange(SPOKEN) + STRIDE) % SPOKEN
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[circle] = SHARPNESS * model.get_input_embeddings().weight[:SPOKEN]
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


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(0, SPOKEN, (count, PROMPT), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy_texts(model: Any, given: list[list[int]], length: int) -> list[Text]:
    """What the target says after these prompts."""
    plans = [Plan(tuple(prompt), 0, 0, (), 0.0, length, tag) for tag, prompt in enumerate(given)]
    writer = Writer(model, eos_token_ids_of(model), len(plans), length)
    written = sorted(writer.write(iter(plans), lambda: False), key=lambda text: text.plan.tag)
    return [Text(text.tokens, text.start, greedy=True) for text in written]


@pytest.fixture(scope="session")
def texts_folder(target_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    Corpus.of(greedy_texts(target_model, prompts(TEXTS), LENGTH)).save(folder / SHARD.format(0))
    return folder


@pytest.fixture
def train(target_folder: Path, texts_folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def say(*words: object) -> tuple[int, Any]:
        status = cli.main(["train", *(str(word) for word in words)])
        return status, capsys.readouterr()

    return say


def arguments(target: Path, texts: Path, steps: int) -> list[object]:
    """What every small training is told."""
    words: list[object] = ["--target", target, "--texts", texts, "--tokens", 100, "--batch-tokens", 1024]
    return [*words, "--steps", steps, "--rate", 0.01, "--longest", LENGTH, "--measure-every", 1000]
