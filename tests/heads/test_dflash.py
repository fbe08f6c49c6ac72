"""DFlash heads of every variant against a plain reference in float64, and what their configs refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.heads.attention import KeyStore
from paceline.heads.dflash import ContextProduct, DFlashConfig, DFlashHead, usual_target_layers
from tests.heads.dflash_reference import block_logits, block_states, random_head, tensors_of

CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
WINDOWED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": CONVOLVED,
    "three-taps": {**CONVOLVED, "conv_kernel_size": 3},
    "dspark": {"sample_from_anchor": True, "markov_rank": 5},
    "jetspec": {"causal": True},
    "windows": WINDOWED,
    "windows-not-causal": {**WINDOWED, "causal": False},
    "sinks": {"attention_sinks": True},
    "scaled": {"input_embedding_scale": 3.0, "output_multiplier": 0.2, "logit_softcap": 5.0},
    "reduced": {"draft_vocab_size": 20, **CONVOLVED},
    "own-head": {"draft_vocab_size": 20, "own_lm_head": True},
}


@pytest.fixture(params=VARIANTS, ids=str)
def head(request: pytest.FixtureRequest) -> DFlashHead:
    return random_head(**VARIANTS[request.param]).double()


def features_of(head: DFlashHead, count: int, seed: int = 3) -> Tensor:
    return torch.randn(count, head.fc.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole_block(head: DFlashHead, features: Tensor, anchor: int) -> Tensor:
    """The states of one block after all of these features."""
    count, size = features.shape[0], head.config.block_size
    stores = head.context_stores(head.context(features)[None], torch.arange(count)[None])
    return pass_over(head, [anchor], stores, torch.arange(count, count + size), torch.arange(count + size), None)[0]


def pass_over(
    head: DFlashHead,
    anchors: list[int],
    stores: list[KeyStore],
    rows: Tensor,
    columns: Tensor,
    mask: Tensor | None,
) -> Tensor:
    masks = [head.config.mask_token_id] * (head.config.block_size - 1)
    ids = torch.tensor([[token for anchor in anchors for token in (anchor, *masks)]])
    return head.forward_block(ids, stores, rows[None], head.layer_masks(mask, rows[None], columns[None]))


def test_a_block_is_what_the_reference_says(head: DFlashHead) -> None:
    tensors, features = tensors_of(head), features_of(head, 9)
    expected = block_states(tensors, head.config, features, 7)
    states = whole_block(head, features, 7)
    assert torch.allclose(states, expected, atol=1e-5)
    assert torch.allclose(head.logits(states), block_logits(tensors, head.config, expected), atol=1e-4)


def test_one_product_writes_the_context_of_all_layers(head: DFlashHead) -> None:
    c, positions = head.context(features_of(head, 6))[None], torch.arange(3, 9)[None]
    entries, heads = ContextProduct(head)(c, positions), head.config.num_kv_heads
    for layer, store in enumerate(head.context_stores(c, positions)):
        here = slice(layer * heads, (layer + 1) * heads)
        assert torch.allclose(entries.keys[:, here], store.entries.keys, atol=1e-10)  # type: ignore[attr-defined]
        assert torch.allclose(entries.values[:, here], store.entries.values, atol=1e-10)  # type: ignore[attr-defined]


def test_many_anchors_of_one_sequence_pass_at_once(head: DFlashHead) -> None:
    """As training does: a row sees the context before its anchor and its own block, nothing of the other blocks."""
    features, anchors, size = features_of(head, 12), [4, 5, 11], head.config.block_size
    rows = torch.cat([torch.arange(anchor, anchor + size) for anchor in anchors])
    owner = torch.arange(len(anchors)).repeat_interleave(size)
    context = torch.arange(12)[None] < torch.tensor(anchors)[owner][:, None]
    mask = torch.cat([context, owner[:, None] == owner[None]], dim=1)[None, None]
    stores = head.context_stores(head.context(features)[None], torch.arange(12)[None])
    states = pass_over(head, [20, 21, 22], stores, rows, torch.cat([torch.arange(12), rows]), mask)
    for index, anchor in enumerate(anchors):
        alone = whole_block(head, features[:anchor], 20 + index)
        assert torch.allclose(states[0, index * size : (index + 1) * size], alone, atol=1e-5)


def test_a_causal_block_may_be_cut_short_and_no_other() -> None:
    for changes, same in (({"causal": True}, True), ({}, False), ({**CONVOLVED, "causal": True}, True)):
        head = random_head(**changes).double()
        assert head.config.is_causal == same
        features, rows = features_of(head, 6), torch.arange(6, 9)
        stores = head.context_stores(head.context(features)[None], torch.arange(6)[None])
        masks = head.layer_masks(None, rows[None], torch.arange(9)[None])
        short = head.forward_block(torch.tensor([[7, 49, 49]]), stores, rows[None], masks)[0]
        assert torch.allclose(short, whole_block(head, features, 7)[:3], atol=1e-8) == same


def test_scores_of_pairs_by_hand() -> None:
    head = random_head(**CONVOLVED).double()
    selector = head.candidate_selector
    assert selector is not None
    states = torch.randn(2, 32, dtype=torch.float64)
    candidates = selector.candidates(head.logits(states))
    before = torch.tensor([[3, 8], [1, 2]])
    scores = selector.pair_scores(states, candidates, before)
    g = states @ selector.hidden_projection.weight.T
    for row, a, b in ((0, 0, 3), (0, 1, 0), (1, 1, 2)):
        pair = selector.predecessor_codebook[before[row, a]] * g[row]
        expected = candidates.scores[row, b] + pair @ selector.successor_codebook[candidates.ids[row, b]]
        assert float(scores[row, a, b]) == pytest.approx(float(expected))


def test_an_untrained_variant_drafts_as_a_plain_head_does() -> None:
    """A convolution starts as the identity and a Markov head without effect, so training starts from DFlash."""
    plain = random_head().double()
    config = replace(plain.config, conv_kernel_size=2, conv_group_size=8, markov_rank=4)
    fancy = DFlashHead(config).double()
    fancy.load_state_dict({**fancy.state_dict(), **plain.state_dict()})
    fancy.bind_target(plain.target.embed, plain.target.lm_head)
    features = features_of(plain, 5)
    states = whole_block(fancy, features, 7)
    assert torch.allclose(states, whole_block(plain, features, 7), atol=1e-10)
    assert fancy.markov_head is not None
    assert not fancy.markov_head.step(states, fancy.markov_head.previous(torch.tensor([1] * 5))).bias.any()


def test_a_mask_embedding_replaces_the_mask_token_only() -> None:
    head = random_head(own_mask_embedding=True)
    vectors = head.embed(torch.tensor([3, 49]))
    assert torch.equal(vectors[1], head.mask_embedding)
    assert torch.equal(vectors[0].double(), head.target.embed(torch.tensor([3]))[0].float().double())


def test_a_reduced_vocabulary_takes_its_rows_of_the_target() -> None:
    head = DFlashHead(replace(random_head(draft_vocab_size=20).config))
    ids = torch.arange(20) * 2 + 1
    head.choose_vocabulary(ids)
    target = random_head().target
    head.bind_target(target.embed, target.lm_head)
    states = torch.randn(3, 32)
    assert torch.allclose(head.logits(states), target.lm_head(states)[:, ids], atol=1e-4)
    assert head.to_target_ids(torch.tensor([2])).tolist() == [5]
    with pytest.raises(OptionError, match="20 tokens, not 3"):
        head.choose_vocabulary(torch.arange(3))


def test_the_usual_layers() -> None:
    assert usual_target_layers(5, 36) == (1, 9, 17, 25, 33)
    assert usual_target_layers(1, 30) == (15,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "evenly"),
        ({"block_size": 1}, "2 tokens or more"),
        ({"feature_layers": (3, 1)}, "rising order"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("sliding_attention",) * 2}, "sliding_window"),
        ({"confidence_reads_markov": True}, "markov_rank"),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "groups of 7"),
        ({"conv_kernel_size": 9, "conv_group_size": 8}, "block of 5"),
        ({"markov_rank": 2, "markov_kind": "odd"}, "kind 'odd'"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    config: DFlashConfig = random_head().config
    with pytest.raises(OptionError, match=message):
        DFlashHead(replace(config, **changes))
