"""Flags from fields, and fields from flags."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paceline import decoder
from paceline.cli import flags, main
from paceline.config import EngineConfig, option_names
from paceline.core.sampling import SamplingParams
from paceline.errors import OptionError
from paceline.tuned import TunedProfile, write_profile


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag, default in (
        ("--port N", "8000"), ("--max-waiting N", "256"), ("--request-timeout S", "600"), ("--drain-timeout S", "60"),
        ("--max-num-seqs N", "16"), ("--warmup W", "fast"), ("--method M", "auto"), ("--num-draft-tokens N", "auto"),
    ):  # fmt: skip
        assert re.search(rf"{flag}(?:(?! --).)*; default: [^;]*\b{default}\b", text), flag
    assert "default: none" not in text


def test_help_describes_the_options_of_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "llama_cpp: draft_p_min (stop drafting below this probability, 0 to 1; default: 0)" in text


@pytest.fixture(autouse=True)
def no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PROFILE", str(tmp_path / "paceline.toml"))


def parse(*arguments: str, positional_model: bool = True, skip: tuple[str, ...] = ()) -> Any:
    parser = flags.CommandParser(prog="paceline test")
    flags.add_config_flags(parser, positional_model=positional_model, skip=skip)
    flags.add_sampling_flags(parser)
    return parser.parse_args(arguments)


def config(*arguments: str, **how: Any) -> EngineConfig:
    return flags.config_from_args(parse(*arguments), **how)


# --- configuration ----------------------------------------------------------------------------------------------------


def test_no_flags_are_the_defaults_of_the_library() -> None:
    assert config() == EngineConfig.create()


def test_every_option_of_the_library_has_a_flag_but_objects() -> None:
    objects = {"tokenizer", "drafter", "per_request", "tuned", "lora"}  # adapters: a flag of `serve` alone
    assert set(vars(parse())) & set(option_names()) == set(option_names()) - objects


def test_flags_set_their_fields() -> None:
    chosen = config(
        "big", "--draft-model", "small", "-k", "5", "--max-num-seqs", "3", "--max-model-len", "99", "--dtype", "bf16",
        "--kv-cache-tokens", "400", "--prefix-cache-tokens", "0", "--batch-invariant", "--engine", "local",
        "--draft-option", "nodes=24", "--draft-option", "way=shared", "--acceptance", "block",
    )  # fmt: skip
    assert chosen == EngineConfig.create(
        "big", draft_model="small", num_draft_tokens=5, max_num_seqs=3, max_model_len=99, dtype="bf16",
        kv_cache_tokens=400, prefix_cache_tokens=0, batch_invariant=True, engine="local",
        draft_options={"nodes": 24, "way": "shared"}, acceptance="block",
    )  # fmt: skip


def test_the_model_is_named_by_position_or_by_flag() -> None:
    assert config("big").model.model == config("-m", "big").model.model == config("--model", "big").model.model == "big"
    assert vars(parse("--model", "big", positional_model=False))["model"] == "big"


def test_a_skipped_field_has_no_flag_and_keeps_its_default() -> None:
    args = parse("big", skip=("method", "num_draft_tokens"))
    assert not {"method", "num_draft_tokens"} & set(vars(args))
    assert flags.config_from_args(args) == EngineConfig.create("big")


def test_overrides_replace_what_the_flags_say() -> None:
    chosen = config("--method", "ngram", method="suffix", per_request=True)
    assert chosen.speculative.method == "suffix" and chosen.per_request


def test_the_default_method_gives_way_to_a_method_and_to_a_draft_model() -> None:
    assert config(default_method="auto").speculative.method == "auto"
    assert config("--method", "ngram", default_method="auto").speculative.method == "ngram"
    assert config("--draft-model", "small", default_method="auto").speculative.method == "draft_model"


def test_a_profile_chooses_only_where_the_user_does_not(tmp_path: Path) -> None:
    write_profile(TunedProfile("default", "cpu", "suffix", 3), tmp_path / "paceline.toml")
    assert config().speculative.method == config(default_method="auto").speculative.method == "suffix"
    assert config("--method", "ngram").speculative.method == "ngram"
    assert config(advised=False).speculative.method == "none"
    assert config("-k", "2").speculative.num_draft_tokens == 2


def test_values_of_draft_options_are_json_or_strings() -> None:
    items = ["nodes=24", "least=0.5", "remember=true", "way=shared", 'way2="a=b"']
    values = {"nodes": 24, "least": 0.5, "remember": True, "way": "shared", "way2": "a=b"}
    assert flags.named_values("--draft-option", items) == values
    for wrong in ("nodes", "=24"):
        with pytest.raises(OptionError, match="NAME=VALUE"):
            flags.named_values("--draft-option", [wrong])


def test_flat_options_make_the_same_configuration() -> None:
    chosen = config("big", "--method", "ngram", "-k", "2", "--max-num-seqs", "3")
    assert EngineConfig.create(**flags.flat_options(chosen)) == chosen


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_every_field_of_sampling_params_has_a_flag() -> None:
    assert {flag.name for flag in flags.SAMPLING_FLAGS} == {item.name for item in fields(SamplingParams)}
    for flag in flags.SAMPLING_FLAGS:
        default = getattr(SamplingParams(), flag.name)
        assert flag.name == "logit_bias" or default is None or isinstance(default, flag.kind)


def test_help_states_the_defaults_of_sampling_params() -> None:
    for flag in flags.SAMPLING_FLAGS:
        default = getattr(SamplingParams(), flag.name)
        if isinstance(default, float | int):
            assert f"default: {default:g}" in flag.help or "0: greedy, the default" in flag.help


def test_unused_sampling_flags_leave_the_librarys_defaults() -> None:
    settings = flags.sampling_from_args(parse())
    assert settings == {"max_new_tokens": decoder.DEFAULT_NEW_TOKENS, "stop": [], "ignore_eos": False}


def test_sampling_flags_become_settings() -> None:
    settings = flags.sampling_from_args(
        parse("--temperature", "0.5", "--min-p", "0.1", "--seed", "3", "--stop", "a", "--stop", "b", "--ignore-eos",
              "--logit-bias", "5=-1.5", "--logit-bias", "6=2", "--max-new-tokens", "9")
    )  # fmt: skip
    assert settings == {
        "max_new_tokens": 9, "stop": ["a", "b"], "ignore_eos": True,
        "temperature": 0.5, "min_p": 0.1, "seed": 3, "logit_bias": {5: -1.5, 6: 2.0},
    }  # fmt: skip


def test_impossible_sampling_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(OptionError, match="top_p"):
        flags.sampling_from_args(parse("--top-p", "2"))
    with pytest.raises(OptionError, match="TOKEN=BIAS"):
        flags.sampling_from_args(parse("--logit-bias", "five=1"))


# --- the parser -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), flags.RENAMED.items())
def test_a_renamed_flag_is_answered_with_its_new_name(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"{old}=3")
    error = capsys.readouterr().err
    assert f"unrecognized arguments: {old}" in error and f"{old} is now {new}" in error


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(SystemExit):
        parse("--draft-mod", "small")


def test_help_lists_methods_and_engines_of_the_registries(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "usage: paceline test [MODEL] [options]" in text
    assert "how to draft: none, " in text and "ngram" in text and "which engine runs the model: " in text
    assert "{" not in text


def test_an_engine_refuses_options_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli import main

    assert main(["generate", "hi", "--tensor-parallel-size", "2"]) == 2
    assert "the engine local does not take tensor_parallel_size" in capsys.readouterr().err
    assert main(["generate", "hi", "--engine-option", "threads=2"]) == 2
    assert "the engine local has no option 'threads'" in capsys.readouterr().err


def test_a_method_that_only_another_engine_has_is_not_taken_for_a_misspelling() -> None:
    parser = flags.CommandParser(prog="x")
    flags.add_config_flags(parser, positional_model=True)
    args = parser.parse_args(["some/model", "--engine", "vllm", "--method", "eagle3"])
    assert flags.config_from_args(args).speculative.method == "eagle3"
    with pytest.raises(OptionError, match="did you mean eagle3"):
        flags.config_from_args(parser.parse_args(["some/model", "--engine", "vllm", "--method", "eagel3"]))
