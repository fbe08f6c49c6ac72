"""What every Runner owes its callers, asked of each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.protocols import Ability, Row, Slot, as_outputs
from tests.contracts.implementations import RUNNERS

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]
OTHER = [27, 18, 28, 18]
TOLERANCE = 2e-4  # float32: another width adds in another order


@pytest.fixture(params=list(RUNNERS))
def runner(request: pytest.FixtureRequest) -> Any:
    return RUNNERS[request.param]()


def read(runner: Any, tokens: list[int]) -> Tensor:
    """The truth to compare with: all tokens in one pass through a slot of its own. [tokens, vocab]"""
    slot = runner.open()
    logits = as_outputs(runner.forward([Row.chain(slot, tokens)])).logits.clone()
    runner.close(slot)
    return logits


def held(runner: Any, tokens: list[int]) -> Slot:
    slot: Slot = runner.open()
    runner.forward([Row.chain(slot, tokens)])
    runner.keep(slot, list(range(len(tokens))))
    return slot


def says(runner: Any, slot: Slot, token: int) -> Tensor:
    return as_outputs(runner.forward([Row.chain(slot, [token])])).logits[-1]


def test_an_open_slot_is_empty(runner: Any) -> None:
    assert runner.open().length == 0


def test_one_by_one_is_the_same_as_at_once(runner: Any) -> None:
    slot, found = runner.open(), []
    for token in TEXT:
        found.append(says(runner, slot, token).clone())
        runner.keep(slot, [0])
    assert slot.length == len(TEXT)
    assert torch.allclose(torch.stack(found), read(runner, TEXT), atol=TOLERANCE)


def test_last_only_says_the_last_row(runner: Any) -> None:
    one, other = runner.open(), runner.open()
    said = as_outputs(runner.forward([Row.chain(one, TEXT), Row.chain(other, OTHER)], last_only=True))
    assert said.sizes == [1, 1]
    assert torch.allclose(said[0].logits[0], read(runner, TEXT)[-1], atol=TOLERANCE)
    assert torch.allclose(said[1].logits[0], read(runner, OTHER)[-1], atol=TOLERANCE)


def test_texts_of_different_lengths_and_widths_share_a_pass(runner: Any) -> None:
    one, other, fresh = held(runner, TEXT[:6]), held(runner, OTHER[:1]), runner.open()
    rows = [Row.chain(one, TEXT[6:]), Row.chain(other, OTHER[1:3]), Row.chain(fresh, TEXT)]
    said = as_outputs(runner.forward(rows))
    assert said.sizes == [4, 2, 10]
    assert torch.allclose(said[0].logits, read(runner, TEXT)[6:], atol=TOLERANCE)
    assert torch.allclose(said[1].logits, read(runner, OTHER)[1:3], atol=TOLERANCE)
    assert torch.allclose(said[2].logits, read(runner, TEXT), atol=TOLERANCE)


def test_the_order_of_rows_is_the_callers(runner: Any) -> None:
    slots = [held(runner, TEXT[: 2 + n]) for n in range(4)]
    order = [2, 0, 3]
    said = as_outputs(runner.forward([Row.chain(slots[n], [7]) for n in order]))
    for place, n in enumerate(order):
        assert torch.allclose(said[place].logits[0], read(runner, [*TEXT[: 2 + n], 7])[-1], atol=TOLERANCE)


def test_a_node_of_a_tree_sees_its_own_path_only(runner: Any) -> None:
    if Ability.TREE not in runner.abilities:
        pytest.skip("this runner reads no trees, and says so")
    slot = held(runner, TEXT[:5])
    tokens, parents = [1, 2, 3, 4, 5], [-1, 0, -1, 2, 0]
    said = as_outputs(runner.forward([Row(slot, torch.tensor(tokens), parents)])).logits
    for node, path in enumerate([[1], [1, 2], [3], [3, 4], [1, 5]]):
        assert torch.allclose(said[node], read(runner, TEXT[:5] + path)[-1], atol=TOLERANCE), f"node {node}"


def test_a_tree_may_stand_at_the_beginning(runner: Any) -> None:
    if Ability.TREE not in runner.abilities:
        pytest.skip("this runner reads no trees, and says so")
    said = as_outputs(runner.forward([Row(runner.open(), torch.tensor([1, 2, 3]), [-1, -1, 1])])).logits
    assert torch.allclose(said[2], read(runner, [2, 3])[-1], atol=TOLERANCE)


def test_keep_remembers_one_path_of_a_tree(runner: Any) -> None:
    if Ability.TREE not in runner.abilities:
        pytest.skip("this runner reads no trees, and says so")
    slot = held(runner, TEXT[:5])
    runner.forward([Row(slot, torch.tensor([1, 2, 3, 4]), [-1, 0, -1, 2])])
    runner.keep(slot, [2, 3])
    assert slot.length == 7
    assert torch.allclose(says(runner, slot, 9), read(runner, [*TEXT[:5], 3, 4, 9])[-1], atol=TOLERANCE)


def test_keep_nothing_of_a_row(runner: Any) -> None:
    slot = held(runner, TEXT[:5])
    runner.forward([Row.chain(slot, [1, 2])])
    runner.keep(slot, [])
    assert slot.length == 5
    assert torch.allclose(says(runner, slot, 9), read(runner, [*TEXT[:5], 9])[-1], atol=TOLERANCE)


def test_a_row_that_nobody_kept_stands_as_a_whole(runner: Any) -> None:
    slot = held(runner, TEXT[:5])
    runner.forward([Row.chain(slot, [1, 2])])
    assert slot.length == 7
    runner.trim(slot, 6)
    assert torch.allclose(says(runner, slot, 9), read(runner, [*TEXT[:5], 1, 9])[-1], atol=TOLERANCE)


def test_trim_forgets_and_never_invents(runner: Any) -> None:
    slot = held(runner, TEXT)
    runner.trim(slot, 4)
    runner.trim(slot, 99)
    assert slot.length == 4
    assert torch.allclose(says(runner, slot, 9), read(runner, [*TEXT[:4], 9])[-1], atol=TOLERANCE)


def test_a_lead_stands_before_the_tokens(runner: Any) -> None:
    slot = held(runner, TEXT[:5])
    said = as_outputs(runner.forward([Row(slot, torch.tensor([2]), [-1, 0], lead=1)])).logits
    assert torch.allclose(said[-1], read(runner, [*TEXT[:5], 1, 2])[-1], atol=TOLERANCE)


def test_a_closed_slots_place_can_be_used_again(runner: Any) -> None:
    first, second = held(runner, TEXT), held(runner, OTHER)
    runner.close(first)
    runner.close(first)  # twice is harmless
    third = held(runner, OTHER[::-1])
    assert torch.allclose(says(runner, second, 9), read(runner, [*OTHER, 9])[-1], atol=TOLERANCE)
    assert torch.allclose(says(runner, third, 9), read(runner, [*OTHER[::-1], 9])[-1], atol=TOLERANCE)


def test_a_fork_goes_its_own_way(runner: Any) -> None:
    slot = held(runner, TEXT)
    twin = runner.fork(slot, 6)
    assert twin.length == 6
    assert torch.allclose(says(runner, twin, 1), read(runner, [*TEXT[:6], 1])[-1], atol=TOLERANCE)
    assert torch.allclose(says(runner, slot, 9), read(runner, [*TEXT, 9])[-1], atol=TOLERANCE)


def test_a_long_text_outgrows_the_first_buffers(runner: Any) -> None:
    long = [(7 * n) % 50 for n in range(400)]
    slot, short = held(runner, long[:200]), held(runner, OTHER)
    runner.forward([Row.chain(slot, long[200:])])
    assert torch.allclose(says(runner, slot, 9), read(runner, [*long, 9])[-1], atol=TOLERANCE)
    assert torch.allclose(says(runner, short, 9), read(runner, [*OTHER, 9])[-1], atol=TOLERANCE)


def test_there_is_room(runner: Any) -> None:
    assert runner.room() > 1000


def test_hidden_states_lead_to_the_logits(runner: Any) -> None:
    if Ability.HIDDEN not in runner.abilities:
        pytest.skip("this runner hands out no hidden states, and says so")
    runner.expose(hidden=True, features=(0, 1, 2))
    one, other = runner.open(), runner.open()
    with torch.no_grad():
        said = as_outputs(runner.forward([Row.chain(one, TEXT), Row.chain(other, OTHER)], last_only=True))
        assert said[0].hidden is not None and said[0].hidden.shape == (len(TEXT), runner.card.width)
        assert said[1].features is not None and said[1].features.shape == (len(OTHER), 3 * runner.card.width)
        assert torch.allclose(runner.head(said[0].hidden)[-1], said[0].logits[0], atol=TOLERANCE)


def test_leaving_early_shares_the_cache(runner: Any) -> None:
    """What the early layers wrote while drafting is what the whole model needs there."""
    if Ability.EXIT not in runner.abilities:
        pytest.skip("this runner cannot stop early, and says so")
    slot = held(runner, TEXT)
    early = runner.exit_at(2)
    first = as_outputs(early.forward([Row.chain(slot, [1])])).logits[-1]
    assert not torch.allclose(first, read(runner, [*TEXT, 1])[-1], atol=TOLERANCE), "that was the whole model"
    early.forward([Row.chain(slot, [2])])
    early.trim(slot, len(TEXT))
    assert torch.allclose(says(runner, slot, 9), read(runner, [*TEXT, 9])[-1], atol=TOLERANCE)
