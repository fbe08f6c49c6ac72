"""A head gets new weights in place, between two steps: the output stays, the acceptance follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.build import open_engine, open_runner
from paceline.config import EngineConfig, ModelConfig
from paceline.core.cost_model import CostModel
from paceline.core.protocols import Engine
from paceline.core.sampling import SamplingParams
from paceline.core.types import Request
from paceline.drafting.eagle import Eagle, check_update
from paceline.errors import CapabilityError, ModelNotFound, WeightsError
from paceline.heads.checkpoint import Provenance
from paceline.heads.eagle3 import Eagle3Head
from paceline.heads.registry import load_head, save_head
from paceline.heads.rounded import RoundedLinear, round_linears, weight_copies
from paceline.heads.shipped import shipped_head
from paceline.hub.default import DIRECTORY
from paceline.layers.cpu_kernels import library
from tests.support.build import collect, ids_of
from tests.train.conftest import random_prompts

NEW_TOKENS = 40


def request(prompt: list[int], **fields: Any) -> Request:
    return Request(prompt, SamplingParams(**fields), NEW_TOKENS, ignore_eos=True, num_draft_tokens=3)


def with_engine(target: Path, work: Callable[[Engine], Any], **options: Any) -> Any:
    async def run() -> Any:
        config = EngineConfig.create(str(target), tuned=CostModel(), per_request=True, **options)
        engine = open_engine(config)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


async def outputs(engine: Engine, prompts: list[list[int]], *, swapping: list[str] = ()) -> list[list[int]]:  # type: ignore[assignment]
    """The answers; heads are swapped while they are generated."""
    requests = [request(prompt, temperature=0.0 if row % 2 else 1.0, seed=row) for row, prompt in enumerate(prompts)]
    tasks = [asyncio.create_task(collect(engine.generate(each))) for each in requests]
    for folder in swapping:
        await engine.update_head(folder)
    return [ids_of(each) for each in await asyncio.gather(*tasks)]


@pytest.mark.slow
def test_heads_swapped_in_while_sequences_run_change_no_token(
    target: Path, head: Path, write_head: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    others = [str(write_head(tmp_path / str(seed), seed)) for seed in (1, 2)]
    prompts = random_prompts(6, seed=5)

    async def work(engine: Engine) -> list[list[list[int]]]:
        return [await outputs(engine, prompts), await outputs(engine, prompts, swapping=[*others, str(head)] * 2)]

    async def plain(engine: Engine) -> list[list[int]]:
        return await outputs(engine, prompts)

    before, during = with_engine(target, work, method="eagle", draft_model=str(head))
    assert before == during == with_engine(target, plain, method="none")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_drafter_with_new_weights_is_one_that_was_built_with_them(
    device: str, head: Path, write_head: Callable[[Path, int], Path], tmp_path: Path, target: Path
) -> None:
    """Addresses stay: captured graphs read the new weights."""
    runner = open_runner(ModelConfig(str(target), dtype="fp32"), device)
    new = write_head(tmp_path / "new", 1)
    module = load_head(head, Eagle3Head, device=device)
    drafter = Eagle(module, runner)
    addresses = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    update = drafter.head_update(str(new))
    expected = load_head(new, Eagle3Head).state_dict()
    assert not torch.equal(module.fc.weight.cpu(), expected["fc.weight"]), "nothing changes before its time"
    update()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.cpu(), expected[name]) and tensor.data_ptr() == addresses[name], name


@pytest.mark.skipif(library() is None, reason="this machine has no compiled CPU kernels")
def test_rounded_products_are_rounded_again(
    head: Path, write_head: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    new = load_head(write_head(tmp_path / "new", 1), Eagle3Head)
    rounded, expected = load_head(head, Eagle3Head), load_head(tmp_path / "new", Eagle3Head)
    round_linears(rounded)
    round_linears(expected)
    assert isinstance(rounded.fc, RoundedLinear)
    for copy in weight_copies(new, rounded):
        copy()
    features = torch.randn(3, new.fc.in_features, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded.logits(rounded.fuse(features)), expected.logits(expected.fuse(features)))


@pytest.mark.slow
def test_the_shipped_head_written_again_is_a_head_of_the_same_shape(tmp_path: Path) -> None:
    folder = shipped_head("eagle", DIRECTORY)
    assert folder is not None
    module = load_head(folder, Eagle3Head)
    save_head(module, tmp_path, provenance=Provenance("other"), dtype=torch.bfloat16)
    check_update(module, load_head(tmp_path, Eagle3Head), str(tmp_path))


@pytest.mark.slow
def test_a_head_of_another_shape_is_refused_and_changes_nothing(target: Path, head: Path, tmp_path: Path) -> None:
    module = load_head(head, Eagle3Head)
    wider = Eagle3Head(replace(module.config, intermediate_size=2 * module.config.intermediate_size))
    save_head(wider, tmp_path / "wider")

    async def work(engine: Engine) -> None:
        with pytest.raises(WeightsError, match="another shape"):
            await engine.update_head(str(tmp_path / "wider"))
        with pytest.raises(ModelNotFound):
            await engine.update_head(str(tmp_path / "nowhere"))
        assert await outputs(engine, random_prompts(1))

    with_engine(target, work, method="eagle", draft_model=str(head))


def test_an_engine_without_a_head_says_so(target: Path, head: Path) -> None:
    async def work(engine: Engine) -> None:
        with pytest.raises(CapabilityError, match="no trained head"):
            await engine.update_head(str(head))

    with_engine(target, work, method="ngram")
