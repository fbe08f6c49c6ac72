"""`vllm serve` with the configuration of an engine, and k by load. Needs no vLLM."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from paceline.config import EngineConfig
from paceline.engines import registry
from paceline.engines.vllm import METHODS, SPEC
from paceline.engines.vllm.speculation import TRANSLATIONS


def flags(tiny_folder: Path, **options: object) -> dict[str, str]:
    config = EngineConfig.create(tiny_folder, engine="vllm", device="cpu", **options)
    assert SPEC.server_command is not None
    words = shlex.split(SPEC.server_command(config))
    assert words[:3] == ["vllm", "serve", str(tiny_folder)]
    return dict(zip(words[3::2], words[4::2]))


def test_the_methods_are_those_that_are_translated() -> None:
    assert ("none", *TRANSLATIONS) == METHODS
    assert registry.spec("vllm").packages == ("vllm",)


def test_speculation_is_one_json_object(tiny_folder: Path) -> None:
    line = flags(tiny_folder, method="ngram", num_draft_tokens=3, max_num_seqs=2, tensor_parallel_size=2)
    speculation = json.loads(line["--speculative-config"])
    assert (speculation["method"], speculation["num_speculative_tokens"]) == ("ngram", 3)
    assert (line["--tensor-parallel-size"], line["--max-num-seqs"], line["--dtype"]) == ("2", "2", "float32")
    assert "--speculative-config" not in flags(tiny_folder)


def test_k_by_load_is_vllms_schedule(tiny_folder: Path) -> None:
    schedule = [[1, 1, 8], [2, 4, 3], [5, 8, 0]]
    assert SPEC.k_by_load is not None
    line = flags(tiny_folder, method="ngram", num_draft_tokens=8, engine_options=SPEC.k_by_load(schedule))
    speculation = json.loads(line["--speculative-config"])
    assert speculation["num_speculative_tokens_per_batch_size"] == schedule
    assert speculation["num_speculative_tokens"] == 8
