"""benchmarks/replay.py: policies over recorded drafts, under a made-up clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.replay import RecordedText, Recording, main, replayed, verified_by
from paceline.core.draft_tree import ROOT, DraftTree, chain

PASS, BLOCK = 0.005, 0.001


def recording(num_right: int) -> Recording:
    """Text that never repeats itself, and a head that is right that many times in a row at every place."""
    prompt, written = list(range(100, 110)), list(range(1000, 1200))
    ids, drafts = [*prompt, *written], {}
    for place in range(len(prompt), len(ids)):
        right = ids[place : place + num_right]
        drafts[place] = ([*right, *[0] * (15 - len(right))], [0.9] * len(right) + [0.1] * (15 - len(right)))
    text = RecordedText("code", prompt, written, None, drafts)
    passes = {width: PASS * (1 + 0.05 * (width - 1)) for width in (1, 2, 4, 8, 16)}
    return Recording("dflash", "int8", passes, {1: BLOCK, 15: BLOCK}, [text])


def test_plain_decoding_takes_a_pass_a_token() -> None:
    row = replayed("plain", recording(3), noise=0.0, seed=0)
    assert row.tokens == {"code": 200} and row.seconds["code"] == pytest.approx(200 * PASS)


def test_a_fixed_k_takes_what_its_steps_take() -> None:
    row = replayed("dflash:3", recording(3), noise=0.0, seed=0)
    assert row.seconds["code"] == pytest.approx(50 * (PASS * 1.15 + BLOCK))


def test_auto_uses_a_head_that_pays_and_no_other() -> None:
    """The policies are the real ones: they find out what the recorded head is worth."""
    good, useless = recording(3), recording(0)
    assert replayed("auto", good, 0.05, 0).rate("code") > 0.9 * replayed("dflash:3", good, 0.05, 0).rate("code")
    assert replayed("auto", useless, 0.05, 0).rate("code") > 0.93 * replayed("plain", useless, 0.05, 0).rate("code")


def test_a_tree_is_verified_along_the_path_that_was_written() -> None:
    tree = DraftTree(chain([7, 5, 6, 6]).tokens, [ROOT, ROOT, 1, 0])
    verified = verified_by([1, 5, 6, 9], 1, tree)
    assert verified.accepted == [1, 2] and verified.tokens == [5, 6] and verified.next_token == 9


@pytest.mark.slow
@pytest.mark.usefixtures("default_folder")
def test_what_a_head_drafts_is_recorded_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the shipped head: it is right often, and its outputs are those of plain decoding."""
    out = tmp_path / "drafts.json"
    assert main(["record", str(out), "--dtype", "fp32", "--limit-prompts", "1", "--max-new-tokens", "12"]) == 0
    read = Recording.read(out)
    assert read.method == "dflash" and read.passes and read.drafts
    text = read.texts[0]
    right = [text.ids[place : place + 1] == tokens[:1] for place, (tokens, _) in text.drafts.items()]
    assert len(text.written) == 12 and sum(right) >= len(right) / 2
    assert main(["run", str(out), "--seeds", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("| auto / best single | ")
