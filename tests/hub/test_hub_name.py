"""Names of the Hub, and the files of a repository that they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ModelNotFound
from paceline.hub.hub_name import HubName, chosen_files
from paceline.hub.shards import missing_files

USUAL = [".gitattributes", "README.md", "config.json"]


@pytest.mark.parametrize(
    "files, chosen",
    [
        (["mask_embedding.pt", "model.safetensors"], ["config.json", "mask_embedding.pt", "model.safetensors"]),
        (["medusa_lm_head.pt"], ["config.json", "medusa_lm_head.pt"]),
        (["medusa_lm_head.pt", "model.safetensors"], ["config.json", "model.safetensors"]),
        (["optimizer.pt", "model.safetensors"], ["config.json", "model.safetensors"]),
    ],
)
def test_pickled_files_of_heads_are_among_the_files_of_a_repository(files: list[str], chosen: list[str]) -> None:
    assert chosen_files(HubName("someone/head"), [*USUAL, *files]) == chosen


def test_other_pickles_are_no_weights() -> None:
    with pytest.raises(ModelNotFound, match="no weights"):
        chosen_files(HubName("someone/head"), [*USUAL, "scheduler.pt", "mask_embedding.pt"])


def test_a_pickled_head_that_was_downloaded_lacks_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert missing_files(tmp_path) == ["model.safetensors"]
    (tmp_path / "medusa_lm_head.pt").touch()
    assert missing_files(tmp_path) == []
