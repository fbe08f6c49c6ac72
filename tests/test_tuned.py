from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.errors import OptionError
from paceline.tuned import TunedProfile, adopted, profile_for, read_profile, write_profile

PROFILE = TunedProfile(
    target="some/model",
    device="cpu",
    method="draft_model",
    num_draft_tokens=4,
    draft_model='path with "quotes"',
    draft_dtype="int4",
    advice="Use method draft_model with k=4: measured 1.50x plain decoding. Ärger",
    predicted=1.42,
    measured=1.5,
    shortest_output=12,
    pass_seconds={1: 0.05, 5: 0.07},
    draft_seconds={0: 0.0, 4: 0.01},
)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "paceline.toml"
    write_profile(PROFILE, path)
    assert read_profile(path) == PROFILE
    assert [item.name for item in tmp_path.iterdir()] == ["paceline.toml"]
    plain = TunedProfile("m", "cpu")
    write_profile(plain, path)
    assert read_profile(path) == plain


def test_a_profile_is_in_force_for_its_target_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_PROFILE", raising=False)
    assert profile_for("some/model") is None
    write_profile(PROFILE, Path("paceline.toml"))
    assert profile_for("some/model") == PROFILE
    assert profile_for("another") is None
    assert profile_for(object()) is None


def test_the_environment_may_name_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    write_profile(PROFILE, path)
    monkeypatch.setenv("PACELINE_PROFILE", str(path))
    assert profile_for("some/model") == PROFILE


@pytest.mark.parametrize(
    "content",
    [
        "not toml at all [",
        "[other]\nx = 1\n",
        '[decoder]\ntarget = "m"\nnum_draft_tokens = 1000\n',
        '[decoder]\ntarget = "m"\n[pass_seconds]\n1 = -3\n',
        '[decoder]\ntarget = "m"\n[pass_seconds]\nwide = 3\n',
        'decoder = "m"\n',
        '[decoder]\ntarget = "m"\nacceptance = "lossy-typical"\n',
    ],
)
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "paceline.toml"
    path.write_text(content)
    with pytest.raises(OptionError, match=r"paceline\.toml"):
        read_profile(path)


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot write"):
        write_profile(PROFILE, tmp_path / "missing" / "paceline.toml")


@pytest.fixture
def _in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile(PROFILE, tmp_path / "p.toml")
    monkeypatch.setenv("PACELINE_PROFILE", str(tmp_path / "p.toml"))


@pytest.mark.usefixtures("_in_force")
def test_a_user_who_chooses_nothing_gets_the_advice() -> None:
    adoption = adopted(EngineConfig.create("some/model"), chosen=False)
    config = adoption.config
    speculative = config.speculative
    assert (speculative.method, speculative.draft_model) == ("draft_model", PROFILE.draft_model)
    assert (speculative.num_draft_tokens, speculative.draft_dtype) == (4, "int4")
    assert config.tuned == PROFILE
    assert adoption.note is not None
    for setting in ("p.toml", "method draft_model", "num draft tokens 4", "draft dtype int4", "measured costs"):
        assert setting in adoption.note
    fixed = adopted(EngineConfig.create("some/model", num_draft_tokens=2), chosen=False).config
    assert fixed.speculative.num_draft_tokens == 2


@pytest.mark.usefixtures("_in_force")
def test_a_user_who_chooses_is_not_overruled() -> None:
    own = EngineConfig.create("some/model", method="ngram")
    assert adopted(own, chosen=True).config is own
    same = adopted(EngineConfig.create("some/model", draft_model=PROFILE.draft_model), chosen=True).config
    assert (same.tuned, same.speculative.num_draft_tokens) == (PROFILE, "auto")


@pytest.mark.usefixtures("_in_force")
@pytest.mark.parametrize("options", [{"model": "another"}, {"device": "cuda"}, {"dtype": "bf16"}])
def test_a_profile_of_another_model_device_or_dtype_is_not_in_force(options: dict[str, str]) -> None:
    config = EngineConfig.create(**{"model": "some/model", **options})
    assert adopted(config, chosen=False).config is config
