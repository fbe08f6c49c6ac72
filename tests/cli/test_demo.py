"""paceline demo, in this process with a tiny model."""

from __future__ import annotations

from typing import Any


def test_demo_prints_both_outputs_and_whether_they_are_identical(run_command: Any) -> None:
    command = ("demo", "-m", "TINY", "--method", "ngram", "--max-new-tokens", "20", "-k", "3", "--json", "abcabcabc")
    result = run_command(*command)
    assert result.status == 0
    assert "identical: yes" in result.out and "speed-up" in result.out and "τ" in result.out
    document = result.json()
    assert document["identical"] is True
    assert document["plain"]["new_tokens"] == document["speculative"]["new_tokens"] > 0
    assert document["plain"]["drafted"] == 0
