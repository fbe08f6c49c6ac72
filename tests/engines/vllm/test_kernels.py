"""The kernels that stand in for vLLM's on a CPU."""

from __future__ import annotations

import pytest
import torch

from paceline.engines.vllm.kernels import expand, for_rows, rms_norm_by_layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_value_is_repeated_for_its_draft_tokens_in_the_outputs_own_memory(dtype: torch.dtype) -> None:
    values = torch.tensor([7, -1, 3], dtype=dtype)
    output = torch.full((5,), 99, dtype=dtype)
    expand(output, values, torch.tensor([2, 3, 5], dtype=torch.int32), -1, 1, MAX_NUM_TOKENS=128)
    assert output.tolist() == [7, 7, 1, 3, 3]


def test_fractions_stay_fractions_and_sequences_without_draft_tokens_have_no_place() -> None:
    output = torch.zeros(3)
    expand(output, torch.tensor([0.25, 0.5, 0.95]), torch.tensor([0, 1, 3]), 0, 0)
    assert output.tolist() == pytest.approx([0.5, 0.95, 0.95])


def test_logits_without_rows_are_left_alone() -> None:
    largest = for_rows(lambda logits, k: logits - k.max())
    assert largest(torch.empty(0, 5), torch.empty(0)).shape == (0, 5)
    assert largest(torch.ones(1, 2), torch.ones(1)).tolist() == [[0.0, 0.0]]


def random_keys() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of two layers, [layers, rows, heads, size], and the weights of their norms."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 5, 3, 32, generator=generator), torch.randn(2, 32, generator=generator)


def normed(keys: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64, by the definition."""
    exact = keys.double()
    return exact / (exact.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def test_each_layer_is_normed_by_its_own_weights() -> None:
    keys, weights = random_keys()
    expected = torch.stack([normed(keys[layer], weights[layer]) for layer in range(2)])
    assert torch.allclose(rms_norm_by_layer(keys, weights, 1e-6).double(), expected, atol=1e-5)


def test_vllms_own_takes_the_weights_of_the_first_layer_for_all() -> None:
    """Why worker.py replaces it. Where this fails, vLLM has mended it and the replacement can go."""
    ops = pytest.importorskip("vllm._custom_ops")
    keys, weights = random_keys()
    output = torch.empty_like(keys)
    ops.rms_norm(output, keys, weights, 1e-6)
    assert torch.allclose(output.double(), normed(keys, weights[0]), atol=1e-5)
    assert not torch.allclose(output[1].double(), normed(keys[1], weights[1]), atol=0.1)
