"""What is done at load: the plan of each kind of warm-up, and that sequences are the same under all of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.build import FAST_CONTEXT, FAST_KS, build_engine, open_model, warmup_plan
from paceline.config import WARMUPS, EngineConfig
from paceline.core.draft_length import AdaptiveDraftLength
from paceline.core.protocols import Preparation
from paceline.core.types import WarmupPlan
from paceline.device.graphs import num_one_off_works
from paceline.errors import OptionError
from tests.support.tiny import write_tiny_model
from tests.support.toy import ToyRunner

INFO = replace(ToyRunner().info, max_seq_len=32_768)


def plan(**options: Any) -> WarmupPlan:
    prepared = warmup_plan(EngineConfig.create("toy", **options), INFO)
    assert prepared is not None
    return prepared


def test_a_fast_warm_up_prepares_what_one_sequence_meets() -> None:
    assert plan(max_num_seqs=1) == WarmupPlan((1,), (), FAST_CONTEXT)
    assert plan(method="ngram", num_draft_tokens=5, max_num_seqs=3) == WarmupPlan(
        (1, 6), (5,), FAST_CONTEXT, quick_batches=(2, 4)
    )
    auto = plan(method="ngram")
    assert auto.num_draft_tokens == FAST_KS and auto.widths == tuple(range(1, 17)) and auto.num_seqs == (1,)
    assert plan(max_model_len=600).max_context == 600


def test_a_full_warm_up_prepares_batches_and_every_context() -> None:
    full = plan(method="ngram", num_draft_tokens=5, warmup="full", max_num_seqs=7)
    assert full.num_seqs == (1, 2, 3, 4, 6, 8) and full.max_context == INFO.max_seq_len


def test_no_warm_up_prepares_nothing_and_a_wrong_name_is_refused() -> None:
    assert warmup_plan(EngineConfig.create("toy", warmup="none"), INFO) is None
    with pytest.raises(OptionError, match="warmup must be one of none, fast, full"):
        EngineConfig.create("toy", warmup="slow")


@pytest.mark.slow
def test_preparations_of_target_and_draft_model_run_at_load(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[WarmupPlan] = []

    def preparations(self: Any, asked: WarmupPlan) -> list[Preparation]:
        return [lambda: plans.append(asked)]

    monkeypatch.setattr("paceline.runners.native.NativeRunner.preparations", preparations)
    for warmup in WARMUPS:
        options: dict[str, Any] = {"draft_model": str(tiny_folder), "num_draft_tokens": 3, "warmup": warmup}
        build_engine(EngineConfig.create(str(tiny_folder), **options))
    target, draft = plans[:2]
    assert len(plans) == 4, "none prepares nothing; the others prepare both models"
    assert (target.widths, target.num_draft_tokens) == ((1, 4), ())
    assert (draft.widths, draft.num_draft_tokens) == ((1, 2), (3,))


def test_a_device_without_graphs_has_nothing_to_prepare(tiny_folder: Path) -> None:
    opened = open_model(EngineConfig.create(str(tiny_folder), device="cpu"))
    assert opened.target.preparations(plan(method="ngram", warmup="full")) == []


@pytest.mark.slow
def test_lookups_beside_a_draft_model_do_not_wait_until_reading_a_prompt_pays(tiny_folder: Path) -> None:
    """`auto` sees to the draft model's turns itself; alone, a draft model must earn what it has to read."""
    catch_up = {}
    for method in ("draft_model", "auto"):
        options: dict[str, Any] = {"method": method, "draft_model": str(tiny_folder), "num_draft_tokens": "auto"}
        policy = build_engine(EngineConfig.create(str(tiny_folder), **options)).parts.draft_length
        assert isinstance(policy, AdaptiveDraftLength)
        catch_up[method] = policy.costs.catch_up
    assert catch_up["draft_model"] > 0 and catch_up["auto"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("warmup", WARMUPS)
def test_the_output_does_not_depend_on_the_warm_up(warmup: str, tiny_folder: Path) -> None:
    with SpeculativeDecoder(tiny_folder, warmup="none") as plain:
        expected = plain.generate("abcabcabc", max_new_tokens=12)
    with SpeculativeDecoder(tiny_folder, method="ngram", warmup=warmup) as decoder:
        result = decoder.generate("abcabcabc", max_new_tokens=12)
        assert decoder.stats().spec.new_tokens == len(result.token_ids), "nothing of the warm-up is counted"
    assert result.token_ids == expected.token_ids


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("method", "k"), [("draft_model", 5), ("draft_model", "auto"), ("auto", "auto")])
def test_nothing_is_captured_inside_a_sequence(method: str, k: int | str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    draft = write_tiny_model(tmp_path / "draft", seed=9)
    options: dict[str, Any] = {"method": method, "draft_model": draft, "num_draft_tokens": k}
    with SpeculativeDecoder(folder, device="cuda", **options) as decoder:
        before = num_one_off_works()
        for length in (1, 10, 100):
            for temperature in (0.0, 0.9):
                decoder.generate("abc " * length, max_new_tokens=60, temperature=temperature)
        assert num_one_off_works() == before


ONE_KERNEL = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "int8"}, "float32"),
        ({"dtype": "int8", "draft_dtype": "int8"}, "int8"),
        ({"dtype": "bf16"}, "bfloat16"),
    ],
)
def test_a_small_draft_keeps_plain_weights_where_its_pass_is_one_kernel(
    options: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write_tiny_model(tmp_path / "model", **ONE_KERNEL))

    def draft_dtype() -> str:
        engine = build_engine(EngineConfig.create(folder, draft_model=folder, device="cpu", warmup="none", **options))
        assert engine.parts.drafter.draft_runner is not None
        return engine.parts.drafter.draft_runner.info.dtype

    assert draft_dtype() == {"bf16": "bfloat16"}.get(options["dtype"], options["dtype"]), "elsewhere as the target's"
    monkeypatch.setattr("paceline.runners.native.loading.supports_persistent_kernels", lambda device: True)
    assert draft_dtype() == expected


@pytest.mark.parametrize("method", ["none", "ngram", "auto"])
def test_a_draft_model_that_a_method_does_not_use_is_mentioned(
    tiny_folder: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    build_engine(EngineConfig.create(tiny_folder, method=method, draft_model=str(tiny_folder), warmup="none"))
    mentioned = f"the draft model is not used: the method {method} drafts without one" in caplog.text
    assert mentioned == (method != "auto")


def test_what_loading_takes_is_said_part_by_part(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("paceline.build.LOG.debug", lambda text, *args: lines.append(text % args))
    build_engine(EngineConfig.create(str(tiny_folder), device="cpu", warmup="none"))
    [said] = lines
    parts = ("target", "drafter", "graphs", "costs", "rehearsal")
    assert re.fullmatch(r"ready after [\d.]+ s: " + ", ".join(rf"{part} [\d.]+" for part in parts), said)
