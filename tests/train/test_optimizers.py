"""Muon for matrices and AdamW for the rest act as one optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import OptionError
from paceline.train import optimizers
from paceline.train.optimizers import optimizer_of


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(20, 4))]


def stepped(optimizer: torch.optim.Optimizer, values: list[nn.Parameter]) -> None:
    optimizer.zero_grad()
    sum((value**2).sum() for value in values).backward()  # type: ignore[union-attr]
    optimizer.step()


def test_matrices_go_to_muon_and_tables_of_tokens_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "TABLE_ROWS", 10)
    values = weights()
    optimizer = optimizer_of("muon", values, 0.1)
    with_momentum = [group for group in optimizer.param_groups if "momentum" in group]
    assert [value.shape for group in with_momentum for value in group["params"]] == [(8, 6)]
    before = [value.detach().clone() for value in values]
    stepped(optimizer, values)
    assert all(not torch.equal(value, old) for value, old in zip(values, before))


def test_a_learning_rate_set_on_the_groups_reaches_both_also_after_loading(tmp_path: Path) -> None:
    values = weights()
    optimizer = optimizer_of("muon", values, 0.1)
    stepped(optimizer, values)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other_values = [nn.Parameter(value.detach().clone()) for value in values]
    other = optimizer_of("muon", other_values, 0.1)
    other.load_state_dict(state)
    for one in (optimizer, other):
        for group in one.param_groups:
            group["lr"] = 0.03
    stepped(optimizer, values)
    stepped(other, other_values)
    assert all(torch.equal(value, twin) for value, twin in zip(values, other_values)), "the same step after loading"
    for group in other.param_groups:
        group["lr"] = 0.0
    still = [value.detach().clone() for value in other_values]
    stepped(other, other_values)
    assert all(torch.equal(value, old) for value, old in zip(other_values, still))


def test_without_muon_in_torch_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(OptionError, match="needs torch 2"):
        optimizer_of("muon", weights(), 0.1)
