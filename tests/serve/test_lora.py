"""LoRA adapters over HTTP: `model: "base:adapter"`, many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from paceline import SpeculativeDecoder
from paceline.build import open_engine
from paceline.cli.serve import Launch
from paceline.config import EngineConfig
from paceline.core.cost_model import CostModel
from paceline.serve.config import ServerConfig
from tests.cli.test_serve_config import launches_of, launches_of_text
from tests.serve.running import NAME, RunningServer, serving
from tests.support.lora import SOME, merged, write_adapter
from tests.support.tiny import byte_tokenizer, tiny_llama

PROMPT = "to be or not to be, that is the question"
NAMES = {NAME: None, f"{NAME}:all": "all", f"{NAME}:some": "some"}


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("lora")
    return {
        "all": str(write_adapter(root / "all", tiny_llama(), 1)),
        "some": str(write_adapter(root / "some", tiny_llama(), 2, modules=SOME)),
    }


@pytest.fixture(scope="module")
def server(loras: dict[str, str]) -> Iterator[RunningServer]:
    config = EngineConfig.create(
        tiny_llama(), tokenizer=byte_tokenizer(), runner="native", lora=loras, method="ngram", tuned=CostModel(),
        per_request=True, max_num_seqs=4,
    )  # fmt: skip
    names = ServerConfig(tuple(NAMES), loras=tuple(loras), max_num_seqs=4)
    with serving(open_engine(config), names) as running:
        yield running


def expected_text(folder: str | None) -> str:
    model = tiny_llama() if folder is None else merged(tiny_llama(), Path(folder))
    with SpeculativeDecoder(model, tokenizer=byte_tokenizer(), runner="native", tuned=CostModel()) as decoder:
        text: str = decoder.generate(PROMPT, max_new_tokens=20, ignore_eos=True).text
        return text


@pytest.mark.slow
def test_requests_for_different_adapters_run_together_and_each_gets_its_own_text(
    server: RunningServer, loras: dict[str, str]
) -> None:
    client, settings = server.client(), {"ignore_eos": True, "speculative": {"num_draft_tokens": 3}}

    def complete(name: str) -> str:
        reply = client.completions.create(
            model=name, prompt=PROMPT, max_tokens=20, temperature=0, stream=True, extra_body=settings
        )
        return "".join(chunk.choices[0].text for chunk in reply)

    names = list(NAMES) * 4
    with ThreadPoolExecutor(len(names)) as pool:
        texts = list(pool.map(complete, names))
    expected = {name: expected_text(lora and loras[lora]) for name, lora in NAMES.items()}
    assert texts == [expected[name] for name in names] and len(set(expected.values())) == 3


def test_adapters_are_listed_as_models_and_unknown_ones_are_404(server: RunningServer) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == list(NAMES)
    with pytest.raises(openai.NotFoundError, match=f"there is no model '{NAME}:other'"):
        client.completions.create(model=f"{NAME}:other", prompt=PROMPT)


@pytest.mark.slow
def test_flags_and_files_name_adapters(tmp_path: Path) -> None:
    [by_flag] = launches_of("some/model", "--lora", "fr=/adapters/fr", "--lora", "2=/adapters/2")
    check_names(by_flag, "some/model", {"fr": "/adapters/fr", "2": "/adapters/2"})
    text = "[[models]]\nmodel = 'some/model'\nnames = ['base']\nlora = { fr = '/adapters/fr' }\n[[models]]\n"
    by_file, other = launches_of_text(tmp_path, text)
    check_names(by_file, "base", {"fr": "/adapters/fr"})
    assert other.engine.model.lora == {} and other.server.lora_of("default:fr") is None


def check_names(launch: Launch, name: str, loras: dict[str, str]) -> None:
    assert launch.engine.model.lora == loras
    assert launch.server.served_model_names == (name, *(f"{name}:{lora}" for lora in loras))
    assert [launch.server.lora_of(f"{name}:{lora}") for lora in loras] == list(loras)
    assert launch.server.lora_of(name) is None is launch.server.lora_of(None)
