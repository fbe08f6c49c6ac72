"""The short measurement before the first sequence: what it returns, and that it leaves nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.cost_model import CostCurve
from paceline.core.types import ModelOutput, Row
from paceline.engines.local import warmup
from paceline.engines.local.warmup import (
    CONTEXT,
    CPU_GRAIN,
    WIDTHS,
    measure_catch_up,
    measure_costs,
    measure_pass,
    pass_grain,
    run_preparations,
    warm_up,
)
from paceline.errors import OutOfMemory
from tests.support.toy import ToyRunner


def test_a_curve_has_a_point_for_every_width_and_nothing_is_kept() -> None:
    runner = ToyRunner()
    curve = measure_pass(runner, (1, 4), repeats=2, num_seqs=3)
    assert curve.sizes == [3, 12] and all(seconds > 0 for seconds in curve.as_dict().values())
    assert runner.passes == [[CONTEXT] * 3] + [[1] * 3, [4] * 3] * 3, "one turn to warm up, two that count"
    assert not runner.open_caches


def test_a_slow_model_is_measured_once_and_no_more() -> None:
    runner = ToyRunner()
    measure_pass(runner, (1,), repeats=50, longest_seconds=0.0)
    assert len(runner.passes) == 3, "the prompt, one pass to warm up, one that counts"


def test_a_measurement_that_fails_gives_its_caches_back() -> None:
    runner = ToyRunner()
    runner.errors = [OutOfMemory("no memory left")]
    with pytest.raises(OutOfMemory):
        measure_pass(runner)
    assert not runner.open_caches


def test_warming_up_runs_each_width_once_and_survives_a_small_cache() -> None:
    runner = ToyRunner()
    runner.info = replace(runner.info, device="cuda:0")
    warm_up(runner, (8, 1, 8))
    assert runner.passes == [[CONTEXT], [1], [8]] and not runner.open_caches
    runner.errors = [OutOfMemory("no memory left")]
    warm_up(runner, (1,))
    assert not runner.open_caches and not runner.errors


def test_on_a_cpu_warming_up_reads_no_more_than_a_token_first() -> None:
    runner = ToyRunner()
    assert runner.info.device == "cpu"
    warm_up(runner, (8, 1))
    assert runner.passes == [[1], [1], [8]] and not runner.open_caches


class ShortRunner(ToyRunner):
    """Fails where a pass goes beyond its context, as learned positions do."""

    def __init__(self, max_seq_len: int) -> None:
        super().__init__()
        self.info = replace(self.info, max_seq_len=max_seq_len)

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        output = super().forward(rows, last_only=last_only)
        assert all(row.seq_cache.length <= self.info.max_seq_len for row in rows)
        return output


@pytest.mark.parametrize("max_seq_len", [2, 3, 16, 32, 50, 73])
def test_no_pass_goes_beyond_a_short_context(max_seq_len: int) -> None:
    curve = measure_pass(ShortRunner(max_seq_len))
    assert curve.sizes == [width for width in WIDTHS if width < max_seq_len]
    warm_up(ShortRunner(max_seq_len), (1, 24, 500))


def test_a_draft_model_costs_one_pass_a_draft_token() -> None:
    costs = measure_costs(ToyRunner(), ToyRunner(), verify=CostCurve({1: 1.0, 8: 2.0}))
    assert costs.width(1) == 1.0
    assert costs.draft.at(8) == pytest.approx(8 * costs.draft.at(1)) and costs.draft.at(1) > 0


def test_only_cpu_kernels_that_take_eight_rows_at_a_time_have_a_grain() -> None:
    """Packed weights are multiplied row by row: nine rows cost about half of sixteen."""
    info, stepped, even = ToyRunner().info, CostCurve({8: 1.0, 9: 1.9, 16: 2.0}), CostCurve({8: 1.0, 9: 1.1, 16: 2.0})
    assert pass_grain(info, stepped) == CPU_GRAIN and pass_grain(info, even) == 1
    assert pass_grain(replace(info, device="cuda:0"), stepped) == 1


def test_what_a_draft_model_has_not_read_is_measured_at_load() -> None:
    runner = ToyRunner()
    assert 0 < measure_catch_up(runner) < 0.1
    assert runner.passes[:2] == [[64], [64]] and not runner.open_caches, "the second time counts"
    assert measure_costs(ToyRunner(), ToyRunner(), verify=CostCurve({1: 1.0})).catch_up > 0


def test_preparations_run_in_order_and_say_how_long_they_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[int] = []
    run_preparations([lambda: done.append(1), lambda: done.append(2)], "capturing graphs", "cpu")
    assert done == [1, 2] and not capsys.readouterr().err, "quick ones say nothing"
    monkeypatch.setattr(warmup, "ANNOUNCE_SECONDS", 0.0)
    run_preparations([lambda: done.append(3)] * 3, "capturing graphs", "cpu")
    assert "paceline: capturing graphs: 1 of 3, about 0 s left" in capsys.readouterr().err


def test_preparations_end_where_memory_does() -> None:
    def fails() -> None:
        raise OutOfMemory("no memory left")

    done: list[int] = []
    run_preparations([fails, lambda: done.append(1)], "capturing graphs", "cpu")
    assert not done
