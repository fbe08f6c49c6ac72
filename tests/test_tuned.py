from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import DecoderOptions
from paceline.errors import OptionError
from paceline.tuned import Profile, adopted, profile_for, read_profile, write_profile

FOUND = Profile(
    target="some/model",
    device="cpu",
    method="draft",
    num_draft_tokens=4,
    draft='path with "quotes"',
    draft_dtype="int4",
    advice="Use method draft with k=4: measured 1.50x plain decoding. Ärger",
    predicted=1.42,
    measured=1.5,
    shortest_answer=12,
    pass_seconds={1: 0.05, 5: 0.07},
    draft_seconds={0: 0.0, 4: 0.01},
)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "paceline.toml"
    write_profile(FOUND, path)
    assert read_profile(path) == FOUND
    assert [item.name for item in tmp_path.iterdir()] == ["paceline.toml"]
    plain = Profile("m", "cpu")
    write_profile(plain, path)
    assert read_profile(path) == plain


def test_a_profile_is_in_force_for_its_target_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_PROFILE", raising=False)
    assert profile_for("some/model") is None
    write_profile(FOUND, Path("paceline.toml"))
    assert profile_for("some/model") == FOUND
    assert profile_for("another") is None
    assert profile_for(object()) is None


def test_the_environment_may_name_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    write_profile(FOUND, path)
    monkeypatch.setenv("PACELINE_PROFILE", str(path))
    assert profile_for("some/model") == FOUND


@pytest.mark.parametrize(
    "content",
    [
        "not toml at all [",
        "[other]\nx = 1\n",
        '[decoder]\ntarget = "m"\nmethod = "magic"\n',
        '[decoder]\ntarget = "m"\ndraft_tokens = 1000\n',
        '[decoder]\ntarget = "m"\n[pass_seconds]\n1 = -3\n',
        '[decoder]\ntarget = "m"\n[pass_seconds]\nwide = 3\n',
        'decoder = "m"\n',
    ],
)
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "paceline.toml"
    path.write_text(content)
    with pytest.raises(OptionError, match=r"paceline\.toml"):
        read_profile(path)


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot write"):
        write_profile(FOUND, tmp_path / "missing" / "paceline.toml")


@pytest.fixture
def _in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile(FOUND, tmp_path / "p.toml")
    monkeypatch.setenv("PACELINE_PROFILE", str(tmp_path / "p.toml"))


@pytest.mark.usefixtures("_in_force")
def test_who_chose_nothing_gets_the_advice() -> None:
    options = adopted(DecoderOptions("some/model"), chosen=False)
    assert (options.method, options.draft, options.num_draft_tokens) == ("draft", FOUND.draft, 4)
    assert options.draft_dtype == "int4"
    assert options.profile == FOUND
    assert adopted(DecoderOptions("some/model", num_draft_tokens=2), chosen=False).num_draft_tokens == 2


@pytest.mark.usefixtures("_in_force")
def test_who_chose_is_not_overruled() -> None:
    own = DecoderOptions("some/model", method="ngram")
    assert adopted(own, chosen=True) is own
    same = adopted(DecoderOptions("some/model", FOUND.draft), chosen=True)
    assert (same.profile, same.num_draft_tokens) == (FOUND, "auto")
    for other in (
        DecoderOptions("another"),
        DecoderOptions("some/model", device="cuda"),
        DecoderOptions("some/model", dtype="bf16"),
    ):
        assert adopted(other, chosen=False) is other
