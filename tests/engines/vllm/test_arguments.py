"""The configuration in vLLM's words, without vLLM."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engines.vllm import SPEC
from paceline.engines.vllm.arguments import VllmArguments, thread_binding, vllm_arguments
from paceline.errors import OptionError


def arguments_of(folder: Path, platform: str = "cpu", **options: Any) -> VllmArguments:
    return vllm_arguments(EngineConfig.create(str(folder), engine="vllm", **options), platform)


def test_the_usual_configuration(tiny_folder: Path) -> None:
    arguments = arguments_of(tiny_folder).arguments
    assert arguments["model"] == str(tiny_folder) and arguments["dtype"] == "float32"
    assert arguments["max_num_seqs"] == 8 and arguments["kv_cache_memory_bytes"] == 4 << 30
    assert arguments["per_request_spec_decode_metrics"] == "none"
    assert not {"speculative_config", "tensor_parallel_size", "max_model_len", "tokenizer"} & set(arguments)


def test_a_gpu_gets_its_own_dtype_and_vllms_share_of_memory(tiny_folder: Path) -> None:
    arguments = arguments_of(tiny_folder, "cuda").arguments
    assert arguments["dtype"] == "bfloat16" and "kv_cache_memory_bytes" not in arguments


def test_what_is_distributed_is_passed_on(tiny_folder: Path) -> None:
    options = {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4,
        "distributed_executor_backend": "ray", "gpu_memory_utilization": 0.5,
    }  # fmt: skip
    arguments = arguments_of(tiny_folder, **options).arguments
    assert {name: arguments[name] for name in options} == options
    assert "kv_cache_memory_bytes" not in arguments


def test_speculation_cache_and_length_are_passed_on(tiny_folder: Path) -> None:
    chosen = arguments_of(
        tiny_folder, method="ngram", num_draft_tokens=3, max_model_len=99, prefill_chunk_tokens=64,
        prefix_cache_tokens=0, kv_cache_tokens=4096, dtype="bf16",
    )  # fmt: skip
    arguments = chosen.arguments
    assert arguments["speculative_config"]["num_speculative_tokens"] == 3
    assert arguments["per_request_spec_decode_metrics"] == "detailed"
    assert arguments["max_model_len"] == 99 and arguments["max_num_batched_tokens"] == 64
    assert arguments["enable_prefix_caching"] is False and arguments["dtype"] == "bfloat16"
    assert chosen.kv_cache_tokens == 4096


def test_engine_options_are_passed_on_and_win(tiny_folder: Path) -> None:
    engine_options = {
        "quantization": "awq", "enforce_eager": True, "kv_cache_gib": 0.5, "max_num_batched_tokens": 77,
        "draft_sample_method": "probabilistic", "speculative_config": {"prompt_lookup_min": 3},
        "engine_args": {"max_num_seqs": 3},
    }  # fmt: skip
    arguments = arguments_of(tiny_folder, method="ngram", engine_options=engine_options).arguments
    assert arguments["quantization"] == "awq" and arguments["enforce_eager"] is True
    assert arguments["kv_cache_memory_bytes"] == 1 << 29 and arguments["max_num_batched_tokens"] == 77
    assert arguments["speculative_config"]["draft_sample_method"] == "probabilistic"
    assert arguments["speculative_config"]["prompt_lookup_min"] == 3
    assert arguments["max_num_seqs"] == 3


def test_the_proposer_of_auto_learns_what_the_user_chose(tiny_folder: Path) -> None:
    arguments = arguments_of(tiny_folder, method="auto", draft_options={"least": 0.1}).arguments
    assert arguments["additional_config"] == {"paceline": {"adaptive": True, "options": {"least": 0.1}}}
    assert arguments_of(tiny_folder, method="auto", num_draft_tokens=2).arguments["additional_config"] == {
        "paceline": {"adaptive": False, "options": {}}
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runner": "native"}, "leave out --runner native"),
        ({"batch_invariant": True}, "VLLM_BATCH_INVARIANT"),
        ({"device": "cuda"}, "runs on cpu, not on cuda"),
        ({"dtype": "int8"}, "quantization="),
        ({"draft_dtype": "bf16", "method": "ngram"}, "leave out --draft-dtype"),
        ({"prefix_cache_tokens": 5}, "prefix_cache_tokens must be 0"),
        ({"engine_options": {"kv_cache_gib": 0}}, "kv_cache_gib must be a number above 0"),
        ({"engine_options": {"engine_args": 3}}, "engine_args must be a JSON object"),
        ({"tokenizer": object()}, "a tokenizer by name or directory"),
    ],
)
def test_what_vllm_cannot_do_is_refused(tiny_folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        arguments_of(tiny_folder, **options)


def test_one_device_of_several_is_chosen_by_the_environment(tiny_folder: Path) -> None:
    with pytest.raises(OptionError, match="CUDA_VISIBLE_DEVICES"):
        arguments_of(tiny_folder, "cuda", device="cuda:1")


def test_a_loaded_model_is_refused(tiny_model: Any) -> None:
    with pytest.raises(OptionError, match="by name or directory"):
        vllm_arguments(EngineConfig.create(tiny_model, engine="vllm"), "cpu")


def test_the_line_that_starts_vllms_own_server_has_the_same_arguments(tiny_folder: Path) -> None:
    """k by load, as `paceline tune` writes it, is part of the speculation."""
    assert SPEC.server_command is not None and SPEC.k_by_load is not None
    options = SPEC.k_by_load([[1, 4, 3], [5, 8, 1]])
    config = EngineConfig.create(
        str(tiny_folder), engine="vllm", device="cpu", method="ngram", num_draft_tokens=3, tensor_parallel_size=2,
        prefix_cache_tokens=0, engine_options={**options, "enforce_eager": True},
    )  # fmt: skip
    words = shlex.split(SPEC.server_command(config))
    assert words[:3] == ["vllm", "serve", str(tiny_folder)]
    assert "--enforce-eager" in words
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    speculation = json.loads(words[words.index("--speculative-config") + 1])
    assert speculation["num_speculative_tokens_per_batch_size"] == [[1, 4, 3], [5, 8, 1]]
    assert speculation["method"] == "ngram" and speculation["num_speculative_tokens"] == 3


def test_workers_on_one_cpu_get_cores_of_their_own() -> None:
    def binding(cores: set[int], **options: Any) -> str | None:
        return thread_binding(EngineConfig.create("m", engine="vllm", **options), "cpu", cores)

    assert binding({0, 1}) is None
    assert binding({0, 1}, tensor_parallel_size=2) == "0|1"
    assert binding({2, 3, 5, 7, 9}, tensor_parallel_size=2) == "2,3|5,7"
    assert binding({0}, tensor_parallel_size=2) == "nobind" == binding({0, 1}, data_parallel_size=2)
    assert thread_binding(EngineConfig.create("m", tensor_parallel_size=2), "cuda", {0, 1}) is None
