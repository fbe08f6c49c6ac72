"""Settings are written once: the flags of `paceline serve` and the table of docs/serving.md follow the fields."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.serve import configure
from paceline.errors import OptionError
from paceline.serve.config import FLAG_CLASSES, LOG_LEVELS, NetworkConfig, RequestLimits, ServerConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"


def flag_fields() -> Iterator[Field[Any]]:
    for config_class in FLAG_CLASSES:
        yield from (field for field in fields(config_class) if "flags" in field.metadata)


def default_text(value: Any) -> str:
    if value is None or value is False or value == ():
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def table_row(field: Field[Any]) -> str:
    metadata = field.metadata
    metavar = f" {metadata['metavar']}" if metadata["metavar"] else ""
    return f"| `{metadata['flags'][0]}{metavar}` | {default_text(field.default)} | {metadata['help']} |"


def test_the_table_of_the_document_has_every_flag() -> None:
    table = "\n".join(["| flag | default | meaning |", "|---|---|---|", *map(table_row, flag_fields())])
    assert table in DOCUMENT.read_text(), f"docs/serving.md should have this table:\n\n{table}"


def test_every_flag_is_in_a_group_of_the_help() -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    for field in flag_fields():
        action = next(action for action in parser._actions if action.dest == field.name)
        assert action.option_strings == list(field.metadata["flags"])
        assert action.default == (list(field.default) if isinstance(field.default, tuple) else field.default)


def test_a_repeated_flag_does_not_change_the_default() -> None:
    for _ in range(2):
        parser = argparse.ArgumentParser()
        configure(parser)
        assert parser.parse_args(["--cors-origin", "http://a.example"]).cors_origins == ["http://a.example"]
    assert NetworkConfig().cors_origins == ()


@pytest.mark.parametrize("names", [(), ("",)])
def test_a_server_needs_a_model_name(names: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match="name"):
        ServerConfig(names)


def test_a_local_server_accepts_local_host_headers_and_the_configured_ones() -> None:
    assert NetworkConfig(allowed_hosts=("a.example",)).accepted_hosts == ("localhost", "127.0.0.1", "::1", "a.example")
    assert NetworkConfig(host="0.0.0.0", no_api_key=True).accepted_hosts == ()


def test_zero_means_none_where_it_makes_sense() -> None:
    limits = RequestLimits(max_waiting=0, max_requests_per_key=0, drain_timeout=0)
    assert limits.max_waiting == 0
    with pytest.raises(OptionError, match="max_choices must be above 0"):
        RequestLimits(max_choices=0)


def test_log_levels_are_those_of_logging() -> None:
    import logging

    assert all(level.upper() in logging.getLevelNamesMapping() for level in LOG_LEVELS)
