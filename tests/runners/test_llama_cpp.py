"""A GGUF file in llama.cpp under our own loop: drafters, exact acceptance, audit. Its contract: tests/contracts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.cli import main
from paceline.errors import MissingExtra, ModelError, OptionError, OutOfMemory
from paceline.runners import llama_cpp_context
from tests.support.engines import ascii_gguf, gguf_llama
from tests.support.gguf import write_gguf

LLAMA_CPP = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
PROMPTS = ["to be or not to be, to be or not to be", "abcabcabc", "one"]
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "chains": {"method": "ngram", "num_draft_tokens": 4, "draft_options": {"shortest": 1}},
    "trees": {"method": "ngram", "num_draft_tokens": 6, "draft_options": {"shortest": 1, "branches": 3}},
    "draft model": {"method": "draft_model", "num_draft_tokens": 3},
    "auto": {"method": "auto"},
}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ascii_gguf(tmp_path_factory.mktemp("gguf")))


@pytest.fixture(scope="module")
def own_outputs(gguf: str) -> list[list[int]]:
    """What transformers generates greedily from the same weights."""
    from paceline.hub.gguf_model import locate_gguf
    from paceline.hub.tokenizer import Tokenizer, load_tokenizer

    model, folder = gguf_llama(), locate_gguf(gguf).tokenizer_folder
    tokenizer = Tokenizer(load_tokenizer(folder, "tiny"))
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        output = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        outputs.append([int(token) for token in output[0, ids.shape[1] :]])
    return outputs


@LLAMA_CPP
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_what_transformers_generates(gguf: str, own_outputs: list[list[int]], method: str) -> None:
    options = METHODS[method] | ({"draft_model": gguf} if method == "draft model" else {})
    with SpeculativeDecoder(gguf, runner="llama_cpp", device="cpu", **options) as decoder:
        results = decoder.generate(PROMPTS, max_new_tokens=24, temperature=0.0, ignore_eos=True)
        assert [result.token_ids for result in results] == own_outputs
    accepted = sum(result.stats.accepted for result in results)
    assert accepted == 0 if method == "plain" else accepted > 0 or method == "auto"


@LLAMA_CPP
def test_sequences_that_do_not_fit_together_come_out_as_if_alone(gguf: str, own_outputs: list[list[int]]) -> None:
    """Two blocks for three sequences: one at a time is read, and a prompt's cache is given up for the next."""
    options = METHODS["trees"] | {"kv_cache_tokens": 128}
    with SpeculativeDecoder(gguf, runner="llama_cpp", device="cpu", **options) as decoder:
        results = decoder.generate(PROMPTS, max_new_tokens=24, temperature=0.0, ignore_eos=True)
    assert [result.token_ids for result in results] == own_outputs


@LLAMA_CPP
@pytest.mark.slow
def test_it_is_audited_as_every_model_is(gguf: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exact probabilities come from llama.cpp's logits. A false alarm has probability 0.001."""
    flags = ["--runner", "llama_cpp", "--device", "cpu", "--methods", "ngram,draft_model", "--draft-model", gguf]
    sizes = ["--quick", "--draws", "300", "--distance", "0.3", "--seconds", "600"]
    assert main(["audit", gguf, *flags, *sizes, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["outcome"] == "lossless"
    assert {check["kind"] for check in document["checks"]} == {"greedy", "sampled"}


@LLAMA_CPP
def test_ids_that_run_out_are_an_error_that_says_so(gguf: str) -> None:
    from paceline.core.types import Row
    from paceline.runners.llama_cpp import open_llama_cpp

    runner = open_llama_cpp(gguf, "cpu", 64 * 300)
    caches = [runner.new_cache() for _ in range(256)]
    runner.forward([Row.chain(cache, [5]) for cache in caches], last_only=True)
    extra, tree = runner.new_cache(), Row(caches[0], torch.tensor([1, 2]), [-1, -1])
    for row in (Row.chain(extra, [5]), tree):
        with pytest.raises(OutOfMemory, match="256 sequences"):
            runner.forward([row])
    assert (extra.length, caches[0].length) == (0, 1)
    runner.free(caches[1])
    assert runner.forward([tree]).sizes == [2]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "leave dtype out"),
        ({"kv_cache_dtype": "lossy-fp8"}, "not for runner llama_cpp"),
    ],
    ids=["dtype", "cache"],
)
def test_options_of_other_runners_are_refused(gguf: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        SpeculativeDecoder(gguf, runner="llama_cpp", device="cpu", **options)


def test_only_gguf_files_are_opened(tiny_folder: Path) -> None:
    with pytest.raises(OptionError, match="not a GGUF file"):
        SpeculativeDecoder(tiny_folder, runner="llama_cpp", device="cpu")
    with pytest.raises(OptionError, match=r"opens a \.gguf file by its name"):
        SpeculativeDecoder(gguf_llama(), tokenizer=tiny_folder, runner="llama_cpp")


@pytest.mark.slow
def test_the_missing_package_is_named_with_its_extra(
    gguf: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else found(name))
    llama_cpp_context._api.cache_clear()
    with pytest.raises(MissingExtra, match=r"pip install '\.\[llama-cpp-python\]'"):
        SpeculativeDecoder(gguf, runner="llama_cpp", device="cpu")
    assert main(["generate", "hello", "-m", gguf, "--runner", "llama_cpp"]) != 0
    errors = capsys.readouterr().err
    assert "pip install '.[llama-cpp-python]'" in errors and "Traceback" not in errors


@LLAMA_CPP
def test_a_file_that_llama_cpp_cannot_load_is_one_line(tmp_path: Path) -> None:
    damaged = write_gguf(tmp_path / "damaged.gguf", gguf_llama(), without=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"llama\.cpp cannot load damaged\.gguf: .*blk\.1\.ffn_up"):
        SpeculativeDecoder(damaged, runner="llama_cpp", device="cpu")


@LLAMA_CPP
def test_drafters_that_read_hidden_states_are_refused(gguf: str) -> None:
    with pytest.raises(ModelError, match="cannot"):
        SpeculativeDecoder(gguf, runner="llama_cpp", device="cpu", method="layerskip")
