"""paceline check --head, in this process with a tiny target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline import SpeculativeDecoder
from paceline.lint.endpoint import LikelyReading, PositionCount, ServerComparison
from paceline.lint.target import StatedText
from paceline.train.teacher import Teacher
from tests.lint.tiny_heads import letters, lopsided_llama, training_text, write_eagle1, write_eagle3, write_mtp
from tests.support.served import serving_flags
from tests.support.tiny import byte_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return lopsided_llama()


@pytest.fixture(scope="module")
def target(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "lopsided"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def training(model: Any) -> StatedText:
    return training_text(Teacher(model))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text(letters(4, seed=2))
    return str(path)


@pytest.fixture(scope="module")
def wrong_head(model: Any, training: StatedText, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MTP head that was trained on states before the final norm; its config does not say so."""
    folder = write_mtp(tmp_path_factory.mktemp("heads") / "mtp", model, training, before_norm=True)
    (folder / "README.md").write_text("how it was trained")
    return folder


@pytest.fixture(scope="module")
def right_head(wrong_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(wrong_head, tmp_path_factory.mktemp("heads") / "right"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mtp_reads_before_final_norm": True}))
    return folder


def test_the_wrong_line_is_named_and_the_corrected_copy_is_right(
    run_command: Any, target: Path, wrong_head: Path, text_file: str, tmp_path: Path
) -> None:
    options = ("--text", text_file, "--tokens", "1024")
    fixed = tmp_path / "fixed"
    result = run_command("check", str(target), "--head", str(wrong_head), *options, "--fix", str(fixed), "--json")
    assert result.status == 2, result.err
    document = result.json()
    [change] = document["changes"]
    assert change["change"] == 'config.json: "mtp_reads_before_final_norm": true, which is not there now'
    assert change["z"] > 5 and change["error_probability"] < 1e-6 and document["num_tested"] >= 8
    assert document["fixed"] == str(fixed) and (fixed / "README.md").read_text() == "how it was trained"
    again = run_command("check", str(target), "--head", str(fixed), *options)
    assert again.status == 0 and "the files are read as they were trained (mtp)" in again.out
    given, best = document["readings"][0], change
    assert best["acceptance"][0] > given["acceptance"][0] + 0.2
    assert f"{best['acceptance'][0]:.3f} ± {best['standard_error'][0]:.3f}" in again.out


@pytest.mark.slow
def test_the_corrected_head_drafts_better_on_both_runners(target: Path, wrong_head: Path, right_head: Path) -> None:
    """Through the decoder: the prompts end in different places of the alphabet."""
    prompts = [letters(1, seed)[:40] for seed in range(24)]
    outputs, accepted = [], []
    for head in (wrong_head, right_head):
        for runner in ("native", "hf"):
            options = {"method": "mtp", "num_draft_tokens": 1, "runner": runner}
            with SpeculativeDecoder(str(target), str(head), **options) as decoder:
                results = decoder.generate(prompts, max_new_tokens=3)
            outputs.append([result.token_ids for result in results])
            accepted.append(sum(result.stats.accepted for result in results))
    assert all(tokens == outputs[0] for tokens in outputs)
    assert accepted[0] == accepted[1] < accepted[2] == accepted[3]


@pytest.mark.slow
def test_the_target_writes_the_text_and_a_correct_head_is_left_alone(
    run_command: Any, target: Path, training: StatedText, tmp_path: Path
) -> None:
    head = write_eagle1(tmp_path / "head", training, before_norm=False)
    out = tmp_path / "out"
    result = run_command("check", str(target), "--head", str(head), "--tokens", "256", "--fix", str(out))
    assert result.status == 0, result.err
    assert "written by" in result.out and "position 1" in result.out and "template" in result.out
    assert "no other reading is better" in result.out and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--head", "nowhere"), "nowhere"),
        (("--head", "TINY"), "holds no head of the kinds"),
        (("--head", "HEAD", "--tokens", "10"), "--tokens must be 256 or more"),
        (("--head", "eagle"), "no eagle head comes with paceline for"),
        (("--head", "HEAD", "--text", "missing.txt"), "missing.txt cannot be read"),
        (("--head", "HEAD", "--fix", "TINY"), "exists already"),
        (("--head", "HEAD", "--url", "http://127.0.0.1:9", "--text", "a.txt"), "leave out --text"),
        (("--head", "HEAD", "--draft-model", "TINY"), "not allowed with"),
        ((), "required"),
    ],
)
def test_what_cannot_be_checked_is_an_error_in_one_line(
    run_command: Any, target: Path, wrong_head: Path, arguments: tuple[str, ...], message: str
) -> None:
    given = [argument.replace("HEAD", str(wrong_head)) for argument in arguments]
    result = run_command("check", str(target), *given)
    assert result.status == 2 and message in result.err and "Traceback" not in result.err


@pytest.mark.slow
def test_a_server_that_reads_a_head_wrongly_is_told_from_one_that_does_not(
    run_command: Any, target: Path, wrong_head: Path, right_head: Path
) -> None:
    """Three draft tokens a step, fewer in the last steps of an answer: position 1 is counted all the same."""
    for served, status in ((wrong_head, 2), (right_head, 0)):
        flags = ("-m", str(target), "--draft-model", str(served), "--method", "mtp", "-k", "3")
        with serving_flags(*flags) as server:
            arguments = ("--head", str(right_head), "--tokens", "512", "--url", server.url, "--json")
            result = run_command("check", str(target), *arguments)
        assert result.status == status, result.err
        compared = result.json()["server"]
        names = [entry["reading"] for entry in compared["likely"]]
        assert names[:1] == (["states before the final norm off"] if status == 2 else [])
        if status == 2:  # the reading gives the server's own counts
            nearest = compared["likely"][0]
            assert nearest["rate"] == pytest.approx(compared["server"]["rate"], abs=0.05) and abs(nearest["z"]) < 1
            assert compared["server"]["rate"] < compared["here"]["rate"] and compared["error_probability"] < 0.01


@pytest.mark.slow
def test_a_layer_that_a_server_reads_one_too_high_is_named(
    run_command: Any, target: Path, training: StatedText, tmp_path: Path
) -> None:
    """Same weights here and there; only the line of the layers differs. The weights are solved for, not trained, and
    their norms are not the best there are, so the readings of norms are named here as well."""
    head = write_eagle3(tmp_path / "head", training, layer=1)
    served = Path(shutil.copytree(head, tmp_path / "served"))
    config = json.loads((served / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2]
    (served / "config.json").write_text(json.dumps(config))
    flags = ("-m", str(target), "--draft-model", str(served), "--method", "eagle", "-k", "2")
    with serving_flags(*flags) as server:
        arguments = ("--head", str(head), "--tokens", "512", "--url", server.url, "--json")
        result = run_command("check", str(target), *arguments)
    assert result.status == 2, result.err
    compared = result.json()["server"]
    assert compared["error_probability"] < 0.01
    assert compared["server"]["rate"] < compared["here"]["rate"]
    assert compared["likely"][0]["reading"] == "layers one higher"


def counts(offered: int, accepted: int) -> PositionCount:
    return PositionCount(offered, accepted)


@pytest.mark.parametrize(
    ("likely", "said"),
    [
        ((), "no reading tried here gives the server's figure"),
        ((("layers one lower", 82),), "the only reading tried here with its figure: layers one lower (0.41)"),
        ((("a", 82), ("b", 86)), "readings tried here with its figure: a (0.41) or b (0.43)"),
    ],
)
def test_a_servers_line_names_every_reading_with_its_figure_and_no_other(
    likely: tuple[tuple[str, int], ...], said: str
) -> None:
    readings = tuple(LikelyReading(name, counts(200, accepted), 0.0) for name, accepted in likely)
    line = ServerComparison("http://a", counts(200, 82), counts(200, 156), readings).line()
    assert "this server's acceptance at position 1 is 0.41 ± 0.03, the head reaches 0.78 ± 0.03 here (z = 7.5" in line
    assert line.endswith(said)
