"""`paceline serve` with several models: arguments, and the file of --config."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.serve import Launch, configure
from paceline.cli.serve_config import arguments_of_models
from paceline.errors import OptionError

FILE = """
[server]
port = 9001
max-waiting = 7
request-timeout = 30
api-key = ["a key of the file", "another key"]
log_prompts = true

[[models]]
model = "some/small"
names = ["small", "gpt-4o-mini"]
method = "ngram"
num-draft-tokens = 4
max_model_len = 512
draft-options = { max = 3 }

[[models]]
model = "some/big"
method = "none"
max-num-seqs = 2
"""


def launches_of(*arguments: str) -> list[Launch]:
    parser = argparse.ArgumentParser()
    configure(parser)
    return [Launch.of(args) for args in arguments_of_models(parser.parse_args(arguments))]


def launches_of_text(tmp_path: Path, text: str, *flags: str) -> list[Launch]:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    return launches_of("--config", str(file), *flags)


def test_the_file_names_models_with_their_own_options(tmp_path: Path) -> None:
    small, big = launches_of_text(tmp_path, FILE)
    assert small.server.served_model_names == ("small", "gpt-4o-mini") and small.engine.model.model == "some/small"
    assert small.engine.speculative.method == "ngram" and small.server.num_draft_tokens == 4
    assert small.engine.speculative.draft_options == {"max": 3} and small.server.max_model_len == 512
    assert big.server.served_model_names == ("some/big",) and big.engine.speculative.method == "none"
    assert big.server.max_num_seqs == 2 and big.server.max_model_len is None and big.engine.per_request


def test_the_settings_of_the_server_count_for_all_models(tmp_path: Path) -> None:
    for launch in launches_of_text(tmp_path, FILE):
        assert launch.server.network.port == 9001 and launch.server.limits.max_waiting == 7
        assert launch.server.network.api_keys == ("a key of the file", "another key")
        assert launch.server.limits.request_timeout == 30 and launch.server.log_prompts


def test_a_flag_of_the_server_wins_and_one_of_the_engine_is_the_default(tmp_path: Path) -> None:
    small, big = launches_of_text(tmp_path, FILE, "--port", "9002", "--max-num-seqs", "5", "--method", "suffix")
    assert small.server.network.port == big.server.network.port == 9002
    assert (small.server.max_num_seqs, big.server.max_num_seqs) == (5, 2)
    assert (small.engine.speculative.method, big.engine.speculative.method) == ("ngram", "none")


def test_models_can_be_named_as_arguments() -> None:
    launches = launches_of("some/small", "some/big", "other", "-k", "2")
    assert [launch.server.served_model_names for launch in launches] == [("some/small",), ("some/big",), ("other",)]
    assert [launch.server.num_draft_tokens for launch in launches] == [2, 2, 2]
    assert [launch.server.served_model_names for launch in launches_of()] == [("default",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = ", "not valid TOML"),
        ("[server]\nport = 1\n", "names no model"),
        ("models = 3\n", "names no model"),
        ("[[model]]\nmodel = 'a'\n", "unknown table .* did you mean models"),
        ("[server]\nprot = 1\n[[models]]\n", "did you mean port"),
        ("[server]\nport = '80'\n[[models]]\n", "port .* cannot be '80'"),
        ("[server]\nlog-prompts = 1\n[[models]]\n", "log_prompts .* cannot be 1"),
        ("server = 3\n[[models]]\n", "server .* is a table"),
        ("[[models]]\nmodel = 'a'\nmethd = 'ngram'\n", "did you mean method"),
        ("[[models]]\nnames = [1]\n", "names"),
        ("[[models]]\ndraft-options = 3\n", "is a table"),
        ("[[models]]\nmax-num-seqs = 0\n", "max_num_seqs"),
        ("[server]\nmax-waiting = -1\n[[models]]\n", "max_waiting"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        launches_of_text(tmp_path, text)


def test_mistakes_are_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("[[models]]\nmodel = 'a'\n[[models]]\nmodel = 'b'\nnames = ['a']\n")
    for arguments, message in (
        (["--config", str(tmp_path / "none.toml")], "cannot be read"),
        (["--config", str(file)], "two models are called a"),
        (["a", "b", "--served-model-name", "x"], "--served-model-name is for one model"),
        (["a", "--config", str(file)], "not both"),
    ):
        assert main(["serve", *arguments]) == 2
        printed = capsys.readouterr().err
        assert message in printed and len(printed.strip().splitlines()) == 1
