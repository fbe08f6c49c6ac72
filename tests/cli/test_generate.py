"""paceline generate, in this process with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.tuned import TunedProfile, write_profile
from tests.support.mtp import write_target
from tests.support.tiny import write_tiny_model

DTYPE_FLAGS = {"default": (), "int4": ("--dtype", "int4")}
FIELDS = {
    "text",
    "token_ids",
    "new_tokens",
    "seconds",
    "tokens_per_second",
    "steps",
    "drafted",
    "accepted",
    "acceptance_rate",
    "tokens_per_step",
    "acceptance_by_position",
    "method",
    "num_draft_tokens",
    "finish_reason",
}


@pytest.mark.slow
def test_json_has_the_same_fields_for_every_method(generate_json: Any, tmp_path: Path) -> None:
    draft_model = str(write_tiny_model(tmp_path / "draft", seed=5))
    choices = (["--method", "none"], ["--method", "ngram", "-k", "3"], ["--draft-model", draft_model, "-k", "2"])
    documents = [generate_json("abcabcabc", *choice) for choice in choices]
    assert [set(document) for document in documents] == [FIELDS] * 3
    assert [document["method"] for document in documents] == ["none", "ngram", "draft_model"]
    assert [document["num_draft_tokens"] for document in documents] == [0, 3, 2]
    assert [document["new_tokens"] for document in documents] == [len(document["token_ids"]) for document in documents]
    assert documents[0]["text"] == documents[1]["text"] == documents[2]["text"]
    assert documents[2]["drafted"] > 0


@pytest.mark.slow
def test_the_prompt_comes_from_an_argument_an_option_a_file_or_stdin(generate_json: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("hello there")
    texts = [
        generate_json("hello there")["text"],
        generate_json("--prompt", "hello there")["text"],
        generate_json("--file", str(tmp_path / "prompt.txt"))["text"],
        generate_json(stdin="hello there")["text"],
        generate_json("-", stdin="hello there")["text"],
    ]
    assert len(set(texts)) == 1
    assert generate_json("--chat", "hello there")["text"] != texts[0]


@pytest.mark.slow
def test_a_seed_makes_sampling_repeatable(generate_json: Any) -> None:
    sampling = ("abc", "--temperature", "1", "--top-p", "0.9", "--top-k", "20", "--method", "ngram", "--seed")
    assert generate_json(*sampling, "7")["token_ids"] == generate_json(*sampling, "7")["token_ids"]
    assert generate_json(*sampling, "7")["token_ids"] != generate_json(*sampling, "8")["token_ids"]


@pytest.mark.slow
def test_penalties_and_biases_reach_the_model(generate_json: Any) -> None:
    token_ids = generate_json("abcabc")["token_ids"]
    assert token_ids[0] not in generate_json("abcabc", "--logit-bias", f"{token_ids[0]}=-100")["token_ids"]
    assert generate_json("abcabc", "--repetition-penalty", "5", "--min-p", "0.1")["token_ids"] != token_ids


@pytest.mark.slow
def test_ignore_eos_generates_every_token(generate_json: Any, run_command: Any) -> None:
    bias = ("--logit-bias", "257=1000")  # the tiny model's end-of-sequence token
    assert generate_json("abc", *bias)["new_tokens"] == 1
    assert generate_json("abc", *bias, "--ignore-eos")["new_tokens"] == 24


@pytest.mark.slow
def test_text_streams_to_stdout_and_figures_go_to_stderr(generate_json: Any, run_command: Any) -> None:
    text = generate_json("abcabc")["text"]
    result = run_command("generate", "-m", "TINY", "--max-new-tokens", "24", "abcabc", "--color", "never")
    assert (result.status, result.out) == (0, text + "\n")
    assert "tokens/s" in result.err


@pytest.mark.slow
def test_accepted_draft_tokens_are_green(run_command: Any) -> None:
    command = ("generate", "-m", "TINY", "--draft-model", "TINY", "-k", "2", "--max-new-tokens", "9", "abc")
    assert "\x1b[32m" in run_command(*command, "--color").out
    assert "\x1b[" not in run_command(*command).out


@pytest.mark.slow
def test_stop_ends_before_the_string(generate_json: Any) -> None:
    whole = generate_json("abcabc")["text"]
    cut = generate_json("abcabc", "--stop", whole[5:7], "--method", "ngram", "-k", "4")
    assert cut["text"] == whole[: whole.index(whole[5:7])]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([""], "empty"),
        ([], "empty"),
        (["x", "--prompt", "y"], "one of them"),
        (["--file", "/no/such/file"], "cannot be read"),
        (["x", "-m", "nonsense"], "no model is called 'nonsense'"),
        (["x", "-m", "/no/where"], "no file or directory"),
        (["x", "--method", "magic"], "'magic'"),
        (["x", "--method", "ngarm"], "there is no method 'ngarm'; did you mean ngram?"),
        (["x", "--method", "draft_model"], "--draft-model"),
        (["x", "--method", "prediction"], "drafts from an output that the client expects"),
        (["x", "--engine", "steam"], "engine must be one of"),
        (["x", "--dtype", "int3"], "there is no dtype"),
        (["x", "--quantize", "q9"], "weight format 'q9'"),
        (["x", "--device", "quantum"], "device must be"),
        (["x", "--acceptance", "all"], "acceptance must be one of"),
        (["x", "-k", "-1"], "0 to 128"),
        (["x", "-k", "129"], "0 to 128"),
        (["x", "-k", "many"], "0 to 128"),
        (["x", "--max-num-seqs", "0"], "max_num_seqs must be"),
        (["x", "--temperature", "-1"], "temperature must be"),
        (["x", "--temperature", "nan"], "temperature must be"),
        (["x", "--temperature", "hot"], "invalid float"),
        (["x", "--top-p", "0"], "top_p must be"),
        (["x", "--top-p", "1.5"], "top_p must be"),
        (["x", "--top-k", "-3"], "top_k must be"),
        (["x", "--logit-bias", "7"], "TOKEN=BIAS"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["x", "--stop", ""], "stop is a string"),
        (["x", "--method", "ngram", "--draft-option", "longest"], "NAME=VALUE"),
        (["x", "--method", "ngram", "--draft-option", "colour=red"], "colour"),
        (["x", "--method", "ngram", "--draft-option", "longest=abc"], "longest must be a whole number, not 'abc'"),
        (["x", "--target", "TINY"], "--target is now MODEL or --model"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_gets_a_clear_error_and_exit_2(run_command: Any, arguments: list[str], reason: str) -> None:
    result = run_command("generate", *([] if "-m" in arguments else ["-m", "TINY"]), *arguments)
    assert result.status == 2
    assert reason in result.err and "Traceback" not in result.err


@pytest.mark.slow
def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(
    run_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    for command in (("generate", "-m", "TINY", "x"), ("tune", "TINY"), ("train", "eagle", "TINY", "--out", "x")):
        result = run_command(*command, "--device", "mps")
        assert result.status == 2 and "Traceback" not in result.err
        assert "mps" in result.err and "cpu" in result.err


def test_a_prompt_longer_than_the_model_reads_is_refused(run_command: Any, tiny_folder: Path) -> None:
    longest = json.loads((tiny_folder / "config.json").read_text())["max_position_embeddings"]
    result = run_command("generate", "-m", "TINY", "x" * longest)
    assert result.status == 2 and f"at most {longest - 1}" in result.err


@pytest.mark.slow
def test_a_draft_model_of_another_vocabulary_is_refused(run_command: Any, other_vocabulary: str) -> None:
    result = run_command("generate", "-m", "TINY", "--draft-model", other_vocabulary, "-k", "2", "abc")
    assert result.status == 2
    assert "vocabularies differ in 6 of 259 tokens (id 0 is" in result.err and "ngram" in result.err


@pytest.mark.slow
def test_a_warm_up_is_chosen_by_its_name(generate_json: Any, run_command: Any, tiny_folder: Path) -> None:
    texts = {generate_json("abcabcabc", "--warmup", warmup)["text"] for warmup in ("none", "fast", "full")}
    assert len(texts) == 1
    result = run_command("generate", "-m", str(tiny_folder), "--warmup", "slow", "x")
    assert result.status == 2 and "warmup must be one of none, fast, full; not 'slow'" in result.err


@pytest.mark.slow
def test_options_of_a_method_are_set_by_name(generate_json: Any) -> None:
    document = generate_json("abcabcabc", "--method", "ngram", "-k", "2", "--draft-option", "longest=2")
    assert document["method"] == "ngram"


@pytest.mark.slow
def test_a_draft_model_may_be_quantized(generate_json: Any, tmp_path: Path) -> None:
    draft_model = str(write_tiny_model(tmp_path / "draft", seed=5))
    plain = generate_json("abcabcabc")
    drafted = generate_json("abcabcabc", "--draft-model", draft_model, "--draft-dtype", "int8", "-k", "2")
    assert drafted["text"] == plain["text"] and drafted["drafted"] > 0


@pytest.mark.slow
def test_the_profile_of_tune_is_used(
    generate_json: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"pass_seconds": {1: 0.01, 8: 0.011}, "draft_seconds": {3: 0.0}}
    write_profile(TunedProfile(str(tiny_folder), "cpu", "suffix", 3, **costs), tmp_path / "paceline.toml")
    monkeypatch.setenv("PACELINE_PROFILE", str(tmp_path / "paceline.toml"))
    advised = generate_json("abcabcabc")
    assert (advised["method"], advised["num_draft_tokens"]) == ("suffix", 3)
    chosen = generate_json("abcabcabc", "--method", "ngram", "-k", "2")
    assert (chosen["method"], chosen["num_draft_tokens"]) == ("ngram", 2), "a method that the user names is kept"
    measured: list[str] = []
    monkeypatch.setattr("paceline.engines.local.warmup.measure_pass", lambda *_, **__: measured.append("a pass"))
    generate_json("abcabcabc", "--method", "suffix")
    assert not measured, "-k auto starts from the profile's costs"


@pytest.mark.slow
def test_a_profile_never_changes_the_text_and_is_always_named(
    run_command: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("generate", "-m", "TINY", "--json", "--max-new-tokens", "24", "abcabcabc")
    texts = {name: run_command(*command, *dtype).json()["text"] for name, dtype in DTYPE_FLAGS.items()}
    assert texts["int4"] != texts["default"], "otherwise this test shows nothing"
    profile = TunedProfile(str(tiny_folder), "cpu", "suffix", 3, dtype="int4")
    write_profile(profile, tmp_path / "paceline.toml")
    monkeypatch.chdir(tmp_path)
    plain = run_command(*command)
    assert plain.json()["text"] == texts["default"] and plain.json()["method"] == "none"
    assert "paceline.toml is not used: it was measured with dtype int4" in plain.err and "--dtype int4" in plain.err
    asked = run_command(*command, "--dtype", "int4")
    assert asked.json()["text"] == texts["int4"] and asked.json()["method"] == "suffix"
    assert "using paceline.toml: method suffix, num draft tokens 3" in asked.err


def test_damaged_weights_and_pickles_are_refused(run_command: Any, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    result = run_command("generate", "-m", str(folder), "x")
    assert result.status == 2 and "cut short" in result.err
    weights.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    result = run_command("generate", "-m", str(folder), "x")
    assert result.status == 2 and "Traceback" not in result.err


@pytest.mark.slow
def test_a_chat_model_that_gets_a_raw_prompt_says_so(run_command: Any, tmp_path: Path) -> None:
    command = ("generate", "-m", "TINY", "--max-new-tokens", "4", "abc")
    raw, hidden = run_command(*command), run_command(*command, "--no-chat")
    assert "the prompt is continued as it is; --chat asks the model" in raw.err and raw.out == hidden.out
    asked = run_command(*command, "--chat")
    assert "--chat" not in hidden.err + asked.err and asked.out != raw.out
    folder = write_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    assert "--chat" not in run_command("generate", "-m", str(folder), "--max-new-tokens", "4", "abc").err


@pytest.mark.slow
def test_mtp_drafts_with_the_head_in_the_checkpoint(run_command: Any, tmp_path: Path) -> None:
    """No --draft-model: the head is among the target's own tensors. Without one the command says so and stops."""
    folder = str(write_target("qwen3_next", tmp_path / "whole"))
    flags = ("generate", "-m", folder, "--json", "--max-new-tokens", "12", "--method")
    drafted, plain = (run_command(*flags, *more, "abcabc").json() for more in (("mtp", "-k", "2"), ("none",)))
    assert drafted["token_ids"] == plain["token_ids"] and drafted["method"] == "mtp" and drafted["drafted"] > 0
    without = str(write_target("qwen3_next", tmp_path / "bare", {}))
    bare = run_command("generate", "-m", without, "--method", "mtp", "abc")
    assert bare.status != 0 and "has no MTP head" in bare.err and "Traceback" not in bare.err
    assert len(bare.err.strip().splitlines()) == 1
