"""cuDNN's attention is left out while engines load and step, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline import SpeculativeDecoder
from paceline.device.attention_plans import LEAST_PLANNED, with_plans, without_plans

cudnn_sdp_enabled = torch.backends.cuda.cudnn_sdp_enabled


@pytest.fixture(autouse=True, params=[True, False])
def usual(request: pytest.FixtureRequest) -> Iterator[bool]:
    """torch's setting, as somebody has left it."""
    before = cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_plans_are_left_out_for_a_while(usual: bool) -> None:
    with without_plans("cuda:1"):
        assert not cudnn_sdp_enabled()
        with without_plans("cuda"):
            assert not cudnn_sdp_enabled()
        assert not cudnn_sdp_enabled(), "one of two is still at work"
    assert cudnn_sdp_enabled() is usual
    with without_plans("cpu"):
        assert cudnn_sdp_enabled() is usual, "there are none"


def test_a_failure_gives_the_setting_back(usual: bool) -> None:
    with pytest.raises(ZeroDivisionError), without_plans("cuda"):
        raise ZeroDivisionError
    assert cudnn_sdp_enabled() is usual


def test_long_passes_that_are_captured_have_plans(usual: bool) -> None:
    with without_plans("cuda"):
        with with_plans(LEAST_PLANNED):
            assert cudnn_sdp_enabled() is usual
        assert not cudnn_sdp_enabled()
        with with_plans(LEAST_PLANNED - 1):
            assert not cudnn_sdp_enabled()
    with with_plans(LEAST_PLANNED):
        assert cudnn_sdp_enabled() is usual


def test_engines_in_several_threads_leave_the_setting_as_it_was(usual: bool) -> None:
    seen: list[bool] = []

    def steps() -> None:
        for _ in range(300):
            with without_plans("cuda"):
                seen.append(cudnn_sdp_enabled())

    threads = [Thread(target=steps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(seen) and len(seen) == 1200
    assert cudnn_sdp_enabled() is usual


def test_a_decoder_loads_and_steps_without_plans(
    usual: bool, tiny_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' attention, on a device that is said to have graphs where the setting is asked for."""
    seen: list[bool] = []
    attend = F.scaled_dot_product_attention

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr("paceline.device.attention_plans.supports_graphs", lambda device: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    with SpeculativeDecoder(str(tiny_folder), runner="hf", method="ngram") as decoder:
        decoder.generate("abcabc", max_new_tokens=8, temperature=0.0)
    assert seen and not any(seen)
    assert cudnn_sdp_enabled() is usual


@pytest.mark.gpu
def test_a_new_prompt_length_waits_for_no_plan(usual: bool) -> None:
    """50 ms of each new shape with plans, a tenth of one without."""
    slowest = 0.0
    with without_plans("cuda"):
        for length in range(8, 20):
            q = torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16)
            torch.cuda.synchronize()
            began = time.perf_counter()
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
            slowest = max(slowest, time.perf_counter() - began) if length > 8 else 0.0  # the first loads the kernel
    assert slowest < 0.02
