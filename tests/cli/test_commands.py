"""generate, demo, chat, check and fetch, said in this process with a tiny model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.tuned import Profile, write_profile
from tests.support.tiny import LONGEST_TEXT, write_tiny_model

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


@pytest.fixture
def say(tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """say(words…) -> exit status and what was printed; `TINY` stands for the tiny model."""

    def speak(*words: str, stdin: str | None = None) -> tuple[int, Any]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin or ""))
        status = cli.main([word.replace("TINY", str(tiny_folder)) for word in words])
        return status, capsys.readouterr()

    return speak


def generated(say: Any, *words: str, stdin: str | None = None) -> dict[str, Any]:
    status, output = say("generate", "--target", "TINY", "--json", "--max-new-tokens", "24", *words, stdin=stdin)
    assert status == 0, output.err
    document: dict[str, Any] = json.loads(output.out.splitlines()[-1])
    return document


def test_json_has_the_same_fields_for_every_method(say: Any, tmp_path: Path) -> None:
    draft = str(write_tiny_model(tmp_path / "draft", seed=5))
    ways = (["--method", "none"], ["--method", "ngram", "-k", "3"], ["--draft", draft, "-k", "2"])
    documents = [generated(say, "abcabcabc", *way) for way in ways]
    assert [set(document) for document in documents] == [FIELDS] * 3
    assert [document["method"] for document in documents] == ["none", "ngram", "draft"]
    assert [document["num_draft_tokens"] for document in documents] == [0, 3, 2]
    assert [document["new_tokens"] for document in documents] == [len(document["token_ids"]) for document in documents]
    assert documents[0]["text"] == documents[1]["text"] == documents[2]["text"]
    assert documents[2]["drafted"] > 0


def test_the_prompt_comes_from_anywhere(say: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("hello there")
    texts = [
        generated(say, "hello there")["text"],
        generated(say, "--file", str(tmp_path / "prompt.txt"))["text"],
        generated(say, stdin="hello there")["text"],
        generated(say, "-", stdin="hello there")["text"],
    ]
    assert len(set(texts)) == 1
    assert generated(say, "--chat", "hello there")["text"] != texts[0]


def test_a_seed_makes_sampling_repeatable(say: Any) -> None:
    how = ("abc", "--temperature", "1", "--top-p", "0.9", "--top-k", "20", "--method", "ngram", "-k", "2", "--seed")
    assert generated(say, *how, "7")["token_ids"] == generated(say, *how, "7")["token_ids"]
    assert generated(say, *how, "7")["token_ids"] != generated(say, *how, "8")["token_ids"]


def test_text_streams_and_figures_go_to_stderr(say: Any) -> None:
    text = generated(say, "abcabc")["text"]
    status, output = say("generate", "--target", "TINY", "--max-new-tokens", "24", "abcabc", "--color", "never")
    assert (status, output.out) == (0, text + "\n")
    assert "tokens/s" in output.err


def test_guesses_that_stood_are_coloured(say: Any, tiny_folder: Path) -> None:
    words = ("generate", "--target", "TINY", "--draft", "TINY", "-k", "2", "--max-new-tokens", "9", "abc")
    assert "\x1b[32m" in say(*words, "--color")[1].out
    assert "\x1b[" not in say(*words)[1].out


def test_stop_ends_before_the_text(say: Any) -> None:
    whole = generated(say, "abcabc")["text"]
    cut = generated(say, "abcabc", "--stop", whole[5:7], "--method", "ngram", "-k", "4")
    assert cut["text"] == whole[: whole.index(whole[5:7])]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["generate", "--target", "TINY", ""], "empty"),
        (["generate", "--target", "TINY"], "empty"),
        (["generate", "--target", "TINY", "--file", "/no/such/file"], "cannot be read"),
        (["generate", "--target", "TINY", "x" * LONGEST_TEXT], f"reads at most {LONGEST_TEXT - 1}"),
        (["generate", "--target", "nonsense", "x"], "no model is called 'nonsense'"),
        (["generate", "--target", "/no/where", "x"], "no file or directory"),
        (["generate", "--target", "TINY", "x", "--method", "magic"], "method must be one of"),
        (["generate", "--target", "TINY", "x", "--method", "draft"], "--draft"),
        (["generate", "--target", "TINY", "x", "--dtype", "int3"], "dtype must be one of"),
        (["generate", "--target", "TINY", "x", "--device", "quantum"], "device must be"),
        (["generate", "--target", "TINY", "x", "--acceptance", "all"], "acceptance must be one of"),
        (["generate", "--target", "TINY", "x", "-k", "-1"], "0 to 128"),
        (["generate", "--target", "TINY", "x", "-k", "129"], "0 to 128"),
        (["generate", "--target", "TINY", "x", "-k", "many"], "0 to 128"),
        (["generate", "--target", "TINY", "x", "--temperature", "-1"], "temperature must be"),
        (["generate", "--target", "TINY", "x", "--temperature", "nan"], "temperature must be"),
        (["generate", "--target", "TINY", "x", "--top-p", "0"], "top_p must be"),
        (["generate", "--target", "TINY", "x", "--top-p", "1.5"], "top_p must be"),
        (["generate", "--target", "TINY", "x", "--top-k", "-3"], "top_k must be"),
        (["generate", "--target", "TINY", "x", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["generate", "--target", "TINY", "x", "--stop", ""], "stop string"),
        (["generate", "--target", "TINY", "x", "--temperature", "hot"], "invalid float"),
        (["fetch", "nonsense"], "no model is called"),
        (["check", "TINY", "--draft-model", "nonsense"], "no model is called"),
    ],
    ids=lambda value: " ".join(value[3:])[:40] if isinstance(value, list) else "",
)
def test_bad_input_gets_a_clear_error_and_exit_2(say: Any, words: list[str], reason: str) -> None:
    status, output = say(*words)
    assert status == 2
    assert reason in output.err and "Traceback" not in output.err


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("foreign") / "model", swapped=6))


def test_a_draft_with_another_vocabulary(say: Any, foreign: str) -> None:
    status, output = say("generate", "--target", "TINY", "--draft", foreign, "-k", "2", "abc")
    assert status == 2
    assert "vocabularies differ in 6 of 259 tokens (id 0 is" in output.err and "ngram" in output.err


def test_check_tells_the_difference(say: Any, foreign: str) -> None:
    assert say("check", "TINY", "--draft-model", "TINY")[0] == 0
    status, output = say("check", "TINY", "--draft-model", foreign, "--json")
    assert status == 2 and "id 0 is" in output.err
    document = json.loads(output.out.splitlines()[-1])
    assert (document["same"], document["differing"], document["same_template"]) == (False, 6, True)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_check_says_how_draft_tokens_are_translated(say: Any, foreign: str) -> None:
    _, output = say("check", "TINY", "--draft-model", foreign)
    assert "two vocabularies" in output.out and "--method cross-vocab" in output.out
    status, output = say("check", "TINY", "--draft-model", "TINY", "--json")
    document = json.loads(output.out)
    assert status == 0 and document["greedy"] == document["sampled"] == "same" and document["share"] == 1.0


def test_options_of_a_method_are_said_by_name(say: Any) -> None:
    assert generated(say, "abcabcabc", "--method", "ngram", "-k", "2", "--option", "longest=2")["method"] == "ngram"
    for wrong, reason in (("longest", "NAME=VALUE"), ("colour=red", "has no option 'colour'")):
        status, output = say("generate", "--target", "TINY", "abc", "--method", "ngram", "--option", wrong)
        assert status == 2 and reason in output.err


def test_a_draft_may_be_quantized(say: Any, tmp_path: Path) -> None:
    draft = str(write_tiny_model(tmp_path / "draft", seed=5))
    plain = generated(say, "abcabcabc")
    drafted = generated(say, "abcabcabc", "--draft", draft, "--draft-dtype", "int8", "-k", "2")
    assert drafted["text"] == plain["text"] and drafted["drafted"] > 0


def test_what_tune_found_out_is_picked_up(
    say: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Profile(str(tiny_folder), "cpu", "suffix", 3, pass_seconds={1: 0.01, 8: 0.011}, draft_seconds={3: 0.0})
    write_profile(found, tmp_path / "paceline.toml")
    monkeypatch.setenv("PACELINE_PROFILE", str(tmp_path / "paceline.toml"))
    advised = generated(say, "abcabcabc")
    assert (advised["method"], advised["num_draft_tokens"]) == ("suffix", 3)
    own = generated(say, "abcabcabc", "--method", "ngram", "-k", "2")
    assert (own["method"], own["num_draft_tokens"]) == ("ngram", 2), "who names a method is not overruled"
    measured: list[str] = []
    monkeypatch.setattr("paceline.engines.local.warmup.measure_pass", lambda *_, **__: measured.append("a pass"))
    generated(say, "abcabcabc", "--method", "suffix")
    assert not measured, "-k auto starts from the profile's costs"


def test_truncated_weights_and_pickles(say: Any, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    status, output = say("generate", "--target", str(folder), "x")
    assert status == 2 and "damaged" in output.err
    weights.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    status, output = say("generate", "--target", str(folder), "x")
    assert status == 2 and "Traceback" not in output.err


def test_fetch_prints_a_directory_that_transformers_loads(say: Any, tiny_folder: Path) -> None:
    status, output = say("fetch", "TINY")
    assert (status, output.out.strip()) == (0, str(tiny_folder.resolve()))
    assert json.loads(say("fetch", "TINY", "--json")[1].out)["folder"] == str(tiny_folder.resolve())


def test_demo_shows_both_texts_and_says_identical(say: Any) -> None:
    status, output = say("demo", "--target", "TINY", "--max-new-tokens", "20", "-k", "3", "--json", "abcabcabc")
    assert status == 0
    assert "identical: yes" in output.out and "speed-up" in output.out and "τ" in output.out
    document = json.loads(output.out.splitlines()[-1])
    assert document["identical"] is True
    assert document["plain"]["new_tokens"] == document["speculative"]["new_tokens"] > 0
    assert document["plain"]["drafted"] == 0


def test_chat_keeps_turns_apart_and_its_cache(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.decode import step

    read: list[int] = []
    prompt_row = step._prompt_row

    def counted(text: Any, chunk: int) -> Any:
        row = prompt_row(text, chunk)
        read.append(len(row.parents))
        return row

    monkeypatch.setattr(step, "_prompt_row", counted)
    first = "a rather long first turn that nobody should have to read twice"
    words = ("chat", "--target", "TINY", "--method", "none", "--max-new-tokens", "5")
    status, output = say(*words, stdin=f"{first}\nagain\n/new\nagain\n/exit\n")
    assert status == 0 and output.out.count("\n") == 3
    assert len(read) == 3 and read[0] > len(first), "every turn reads something"
    assert read[1] < len(first), "the second turn reads only what is new"
