"""What a race says of two outputs, in node: compare.js needs no browser."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import paceline.serve

COMPARE = Path(paceline.serve.__file__).parent / "page" / "compare.js"
SCRIPT = """
const { compareOutputs, describeRace } = await import(process.argv[1]);
const { off, on, bound, lanes } = JSON.parse(process.argv[2]);
const comparison = compareOutputs(off, on, bound);
console.log(JSON.stringify({
  kind: comparison.kind, text: describeRace(lanes.off, lanes.on, comparison, { dtype: "float32", bound }),
}));
"""


def token(text: str, logprob: float, rival: str = "?", rival_logprob: float = -9.0) -> dict[str, Any]:
    """A token of an output, and the token that the model ranks next to it. An empty rival is an end token."""
    top = [{"token": text, "logprob": logprob, "bytes": list(text.encode())}]
    rival_bytes = list(rival.encode()) or None
    return {**top[0], "top_logprobs": [*top, {"token": rival, "logprob": rival_logprob, "bytes": rival_bytes}]}


def lane(speed: float = 10.0, steps: int = 30, tau: float = 1.0, drafted: int = 0) -> dict[str, Any]:
    return {"speed": speed, "steps": steps, "tokensPerStep": tau, "drafted": drafted}


SPECULATIVE = lane(15.0, 15, 2.0, 30)


def said(
    off: list[Any], on: list[Any], off_lane: dict[str, Any] | None = None, on_lane: dict[str, Any] | None = None
) -> dict[str, str]:
    """What the page says of these outputs."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    lanes = {"off": off_lane or lane(), "on": on_lane or SPECULATIVE}
    data = json.dumps({"off": off, "on": on, "bound": 0.001, "lanes": lanes})
    command = [node, "--input-type=module", "--no-warnings", "-e", SCRIPT, COMPARE.as_uri(), data]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    document: dict[str, str] = json.loads(result.stdout)
    return document


SHARED = [token("a", -0.1), token("b", -0.2)]
TIE = math.log(0.4)


def test_equal_outputs_are_the_same() -> None:
    document = said(SHARED, SHARED)
    assert document["kind"] == "same"
    assert document["text"] == "1.50× speed, 15 steps instead of 30. It is the same output."


@pytest.mark.slow
def test_a_near_tie_is_one_where_both_lanes_rank_both_tokens_alike() -> None:
    off = [*SHARED, token("x", TIE, "y", TIE - 0.0002), token("p", -1)]
    on = [*SHARED, token("y", TIE, "x", TIE - 0.0001), token("q", -1)]
    document = said(off, on)
    assert document["kind"] == "near-tie"
    assert "token 3: “x” without speculation, “y” with it" in document["text"]
    assert "a near-tie: their log-probabilities differ by 0.00020" in document["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("off", "on"),
    [
        (token("x", TIE, "y", TIE - 0.5), token("y", TIE, "x", TIE - 0.5)),
        (token("x", TIE, "y", TIE - 0.0002), token("y", -0.01, "x", -5.0)),  # one lane saw another context
        (token("x", TIE, "z", TIE - 0.0002), token("y", TIE, "x", TIE - 0.0002)),  # off does not know y
    ],
    ids=["far apart", "far apart in one lane", "not among the likeliest"],
)
def test_any_other_difference_is_called_different_and_no_speed_up_is_shown(off: Any, on: Any) -> None:
    document = said([*SHARED, off], [*SHARED, on])
    assert document["kind"] == "different"
    assert "A different output from token 3" in document["text"] and "no near-tie" in document["text"]
    assert "×" not in document["text"]


@pytest.mark.slow
def test_an_output_that_ends_earlier_is_a_near_tie_only_beside_an_end_token() -> None:
    assert said(SHARED, [*SHARED, token("x", TIE, "", TIE - 0.0002)])["kind"] == "near-tie"
    document = said(SHARED, [*SHARED, token("x", TIE, "y", TIE - 0.0002)])
    assert document["kind"] == "different" and "the end without speculation" in document["text"]


@pytest.mark.slow
def test_a_speed_up_that_speculation_cannot_give_is_noise() -> None:
    assert "1.30× speed without any draft token: the difference is noise" in said(
        SHARED, SHARED, on_lane=lane(13.0, 30, 1.0, 0)
    )["text"]
    text = said(SHARED, SHARED, on_lane=lane(25.0, 15, 2.0, 30))["text"]
    assert "2.50× speed measured, more than 2.00 tokens per step can give: the excess is noise" in text
    assert "too short" in said(SHARED, SHARED, off_lane=lane(0.0))["text"]


def test_an_engine_that_reports_no_steps_is_not_said_to_draft_nothing() -> None:
    text = said(SHARED, SHARED, off_lane=lane(steps=0, tau=0.0), on_lane=lane(15.0, 0, 0.0, 0))["text"]
    assert text == "1.50× speed; the engine does not report its steps. It is the same output."
