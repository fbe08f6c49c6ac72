"""Recurrent models in the engine of a server: many clients, every method, a model that is decoded plainly."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request
from tests.support.build import collect, ids_of, with_engine
from tests.support.families import Variant, expected_tokens, prompts_of, write_family

NEW_TOKENS = 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2", "gemma3_text", "qwen3_5_text", "qwen3_next"])
def test_sixteen_clients_at_once_get_the_text_of_one(kind: str, tmp_path: Path) -> None:
    folder = write_family(Variant(kind), tmp_path)
    prompts = [prompt for seed in range(4) for prompt in prompts_of(seed)] + [prompts_of(0)[0]] * 4
    expected = expected_tokens(folder, prompts, NEW_TOKENS)

    async def work(engine: Any) -> None:
        requests = [
            Request(prompt, SamplingParams(), NEW_TOKENS, ignore_eos=True, method=engine.methods[place % 4])
            for place, prompt in enumerate(prompts)
        ]
        outputs = await asyncio.gather(*(collect(engine.generate(request)) for request in requests))
        assert [ids_of(output) for output in outputs] == expected

    with_engine(folder, work, num_draft_tokens=4)


@pytest.mark.slow
def test_a_request_may_name_a_method_where_decoding_is_plain(tmp_path: Path) -> None:
    folder = write_family(Variant("mamba"), tmp_path)
    [prompt, *_] = prompts_of()
    [expected] = expected_tokens(folder, [prompt], NEW_TOKENS)

    async def work(engine: Any) -> None:
        for method in ("ngram", "suffix", "lookahead", "none"):
            request = Request(prompt, SamplingParams(), NEW_TOKENS, ignore_eos=True, method=method, num_draft_tokens=3)
            assert ids_of(await collect(engine.generate(request))) == expected

    with_engine(folder, work)


@pytest.mark.slow
def test_the_command_line_says_once_that_a_model_is_decoded_plainly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_family(Variant("mamba"), tmp_path)
    with caplog.at_level(logging.WARNING):
        command = ["generate", "hello", "--model", str(folder), "--method", "ngram", "--max-new-tokens", "4"]
        assert main(command) == 0
    assert len([record for record in caplog.records if "decoded plainly" in record.message]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "suffix", "lookahead", "ngram"])
def test_the_number_of_draft_tokens_may_be_chosen_by_measuring(method: str, tmp_path: Path) -> None:
    from paceline import SpeculativeDecoder

    folder = write_family(Variant("qwen3_next"), tmp_path)
    prompts = prompts_of()
    with SpeculativeDecoder(str(folder), method=method, num_draft_tokens="auto") as decoder:
        results = decoder.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert [result.token_ids for result in results] == expected_tokens(folder, prompts, NEW_TOKENS)
