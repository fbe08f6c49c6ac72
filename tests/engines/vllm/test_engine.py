"""vLLM through the doors of its users: the command line, the library, HTTP. Each start takes half a minute, so one
process is asked many things. `make test-engines` installs what these tests need; elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.build import open_tokenizer
from paceline.cli import main
from paceline.config import ModelConfig
from paceline.errors import OptionError
from tests.support.tiny import write_tiny_model

PROMPT = "to be or not to be, to be or not to be"
QUICK = {"enforce_eager": True, "kv_cache_gib": 0.25}
START_SECONDS = 600  # of a machine that is busy with other tests
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm: make test-engines")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads of a size that vLLM's CPU kernels have, and that divide by two."""
    return write_tiny_model(tmp_path_factory.mktemp("wide") / "model", hidden_size=128)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is not the target and often agrees with it."""
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path_factory.mktemp("draft") / "model", hidden_size=128)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def own_tokens(model: Any, tokenizer: Any, prompt: str, number: int) -> list[int]:
    """What transformers generates greedily, past every end token."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    output = model.generate(ids, max_new_tokens=number, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in output[0, ids.shape[1] :]]


def engine_flags() -> list[str]:
    return [word for name, value in QUICK.items() for word in ("--engine-option", f"{name}={json.dumps(value)}")]


def generate(folder: Path, *flags: str) -> dict[str, Any]:
    """`paceline generate --engine vllm`: the JSON document, which is all there is on stdout."""
    command = [
        sys.executable, "-m", "paceline", "generate", PROMPT, "-m", str(folder), "--engine", "vllm", "--json",
        "--max-new-tokens", "32", "--ignore-eos", *engine_flags(), *flags,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    [line] = done.stdout.splitlines()
    document: dict[str, Any] = json.loads(line)
    return document


@pytest.fixture(scope="module")
def one_process(folder: Path) -> dict[str, Any]:
    return generate(folder, "--method", "ngram", "-k", "3")


# --- without vLLM -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_without_the_package_one_line_says_what_to_install(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", PROMPT, "-m", str(tiny_folder), "--engine", "vllm"]) != 0
    assert "this needs vllm: in paceline's checkout, pip install '.[vllm]'" in capsys.readouterr().err


# --- the command line -------------------------------------------------------------------------------------------------


@needs_vllm
def test_the_command_line_gives_the_models_own_text(one_process: dict[str, Any], folder: Path, model: Any) -> None:
    tokenizer = open_tokenizer(ModelConfig(str(folder)))
    expected = own_tokens(model, tokenizer, PROMPT, 32)
    assert one_process["token_ids"] == expected and one_process["text"] == tokenizer.decode(expected)
    assert one_process["method"] == "ngram" and one_process["steps"] + one_process["accepted"] == 32


@needs_vllm
def test_two_processes_give_the_text_of_one(one_process: dict[str, Any], folder: Path) -> None:
    divided = generate(folder, "--method", "ngram", "-k", "3", "--tensor-parallel-size", "2")
    assert divided["token_ids"] == one_process["token_ids"] and divided["text"] == one_process["text"]


# --- the server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """`paceline serve --engine vllm` over two processes that share each layer."""

    popen: subprocess.Popen[str]
    url: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    command = [
        sys.executable, "-m", "paceline", "serve", str(folder), "--engine", "vllm", "--port", "0",
        "--served-model-name", "model", "--tensor-parallel-size", "2", *engine_flags(),
    ]  # fmt: skip
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ)
    assert popen.stdout is not None
    line = next((line for line in popen.stdout if line.startswith("paceline serves")), "")
    assert line, f"the server ended with {popen.wait()}"
    yield Server(popen, line.split(" at ")[1].split()[0].removesuffix("/v1"))
    popen.terminate()
    try:
        popen.wait(60)
    except subprocess.TimeoutExpired:
        popen.kill()


@needs_vllm
def test_the_server_gives_the_text_of_the_command_line(server: Server, one_process: dict[str, Any]) -> None:
    """With its own method, auto: our proposer inside vLLM's workers."""
    settings: dict[str, Any] = {"model": "model", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    answer = server.client().completions.create(**settings, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == one_process["text"] and answer.choices[0].finish_reason == "length"
    chunks = server.client().completions.create(**settings, stream=True, extra_body={"ignore_eos": True})
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == one_process["text"]


@needs_vllm
def test_the_server_names_its_method_and_refuses_another(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="method must be auto, as the engine vllm was started"):
        server.client().completions.create(
            model="model", prompt=PROMPT, max_tokens=2, extra_body={"speculative": {"method": "none"}}
        )
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'method="auto"' in text


@needs_vllm
def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    settings: dict[str, Any] = {"model": "model", "prompt": PROMPT, "max_tokens": 450, "temperature": 0}
    with server.client().completions.create(**settings, stream=True, extra_body={"ignore_eos": True}) as chunks:
        next(iter(chunks))
    deadline = time.monotonic() + 120
    while running(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running(server) == 0


def running(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("paceline_requests_running"))


@needs_vllm
def test_a_dead_worker_fails_its_requests_shows_in_health_and_is_restarted(
    server: Server, one_process: dict[str, Any]
) -> None:
    import psutil

    settings: dict[str, Any] = {"model": "model", "prompt": PROMPT, "max_tokens": 450, "temperature": 0}
    chunks = iter(server.client().completions.create(**settings, stream=True, extra_body={"ignore_eos": True}))
    next(chunks)
    children = psutil.Process(server.popen.pid).children(recursive=True)
    [worker, _] = [child for child in children if "Worker" in " ".join(child.cmdline())]
    worker.kill()
    with pytest.raises(openai.APIError, match="died"):
        list(chunks)
    with pytest.raises(openai.APIError, match="died"):
        server.client().completions.create(**settings)
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 503
    deadline = time.monotonic() + START_SECONDS
    while httpx.get(f"{server.url}/health", timeout=60).status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.5)
    again = server.client().completions.create(**{**settings, "max_tokens": 32}, extra_body={"ignore_eos": True})
    assert again.choices[0].text == one_process["text"]


# --- the library ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(folder: Path, draft_folder: Path) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder(
        folder, draft_folder, engine="vllm", num_draft_tokens=3, max_num_seqs=64, engine_options=QUICK
    ) as decoder:
        yield decoder


@needs_vllm
def test_a_draft_model_changes_no_greedy_text(decoder: SpeculativeDecoder, model: Any) -> None:
    result = decoder.generate(PROMPT, max_new_tokens=32, ignore_eos=True)
    assert result.token_ids == own_tokens(model, decoder.tokenizer, PROMPT, 32)
    assert 0 < result.stats.accepted == sum(result.from_draft) < result.stats.drafted
    assert result.stats.offered_at[0] >= result.stats.offered_at[1]


@needs_vllm
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 8}], ids=str)
def test_a_draft_model_changes_no_distribution(decoder: SpeculativeDecoder, model: Any, settings: Any) -> None:
    """χ² of the second new token, the first that is drafted, against the model's own. Fails by chance once in 10⁵."""
    from scipy import stats

    from paceline.core.sampling import SamplingParams, distribution

    settings = {"temperature": 1.0, **settings}
    count, sampling = 1500, SamplingParams(**settings)
    prompt = decoder.tokenizer.encode(PROMPT)
    with torch.no_grad():
        first = distribution(model(torch.tensor([prompt])).logits[0, -1], sampling)
        rows = torch.tensor([[*prompt, token] for token in range(len(first))])
        second = first.double() @ distribution(model(rows).logits[:, -1], sampling).double()
    results = decoder.generate([PROMPT] * count, max_new_tokens=2, ignore_eos=True, **settings)
    observed = Counter(result.token_ids[1] for result in results)
    assert not [token for token in observed if second[token] == 0]
    likely = [token for token in range(len(second)) if count * float(second[token]) >= 5]
    expected = [count * float(second[token]) for token in likely]
    seen = [observed[token] for token in likely]
    rest = count - sum(expected)
    if rest > 1:
        expected, seen = [*expected, rest], [*seen, count - sum(seen)]
    scale = sum(seen) / sum(expected)
    assert stats.chisquare(seen, [value * scale for value in expected]).pvalue > 1e-5


@needs_vllm
def test_what_its_requests_cannot_choose_is_said(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(OptionError, match="num_draft_tokens must be 3, as the engine vllm was started"):
        decoder.generate(PROMPT, num_draft_tokens=2)
    with pytest.raises(OptionError, match="cannot verify draft tokens under logit_bias"):
        decoder.generate(PROMPT, logit_bias={5: 1.0})


@needs_vllm
@pytest.mark.model
def test_the_head_that_paceline_trained_drafts_inside_vllm(default_model: Any) -> None:
    """The EAGLE-3 head that comes with paceline, through `--method eagle` alone."""
    with SpeculativeDecoder(
        "default", engine="vllm", method="eagle", num_draft_tokens=3, max_model_len=512, engine_options=QUICK
    ) as decoder:
        result = decoder.generate("The capital of France is", max_new_tokens=24, ignore_eos=True)
        expected = own_tokens(default_model, decoder.tokenizer, "The capital of France is", 24)
    assert result.token_ids == expected and result.stats.accepted > 0
