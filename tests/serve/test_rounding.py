"""What rounding can explain, by dtype."""

from __future__ import annotations

from paceline.serve.rounding import near_tie_logprob


def test_a_coarser_dtype_explains_more_and_an_unknown_one_the_most() -> None:
    bounds = [near_tie_logprob(dtype) for dtype in ("float32", "float16", "bfloat16", "int8")]
    assert bounds == sorted(bounds) and bounds[0] < bounds[1] < bounds[2] == bounds[3]
    assert near_tie_logprob("fp32") == near_tie_logprob("float32")
