"""Chains of an EAGLE head captured on a GPU. What they compute is tested in test_eagle.py, on any machine."""

from __future__ import annotations

import pytest
import torch

from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.drafting import eagle_graph
from paceline.drafting.eagle import Eagle
from paceline.drafting.no_draft import NoDraft
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head
from paceline.runners.native import NativeRunner
from tests.runners.native.models import tiny
from tests.support.build import sequence
from tests.support.drafter_exactness import engine_of

DEVICE = "cuda"


def written(target: NativeRunner, drafter: Drafter, prompts: list[list[int]], k: int) -> list[Sequence]:
    return engine_of(target, drafter, k).run([sequence(list(prompt), 300) for prompt in prompts])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_chains_guess_what_launches_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts short and long, texts long enough that the buffers move twice while graphs are there."""
    torch.manual_seed(0)
    monkeypatch.setattr(eagle_graph, "ROOM_ROWS", 1)
    monkeypatch.setattr(eagle_graph, "ROOM_TOKENS", 1)
    target = NativeRunner.of_model(tiny("llama").to(DEVICE), "tiny", kv_cache_tokens=8192)
    config = Eagle3Config(48, 80, 2, 1, 24, 101, 60, 48, feature_layers=(0, 1, 2))
    head = Eagle3Head(config).to(DEVICE).eval().requires_grad_(False)
    head.choose_vocabulary(torch.arange(60))
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in (40, 3, 120)]
    captured, launched = Eagle(head, target), Eagle(head, target)
    launched.graphs = None
    plain = written(target, NoDraft(), prompts, 0)
    found = [written(target, drafter, prompts, 4) for drafter in (captured, launched)]
    assert captured._buffers.version >= 2
    for seqs in found:
        assert [seq.generated for seq in seqs] == [seq.generated for seq in plain]
    accepted = [sum(seq.stats.accepted for seq in seqs) for seqs in found]
    assert accepted[0] == pytest.approx(accepted[1], abs=2)  # products of other shapes round in other ways
