"""The modules themselves: attention as transformers has it, caches, masks, and what each kind of head computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.heads.attention import Attention, AttentionSettings, JoinedKeys, RotarySettings, causal_mask
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.eagle1 import Eagle1Config, Eagle1Head
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head, usual_feature_layers
from paceline.heads.exit_adapter import ExitAdapter, ExitConfig
from paceline.heads.kv_cache import KeyBuffers
from paceline.heads.medusa import MedusaConfig, MedusaHeads

ONE = Eagle1Config(16, 24, 4, 2, 4, 20, 20, 16, fc_bias=True)
THREE = Eagle3Config(16, 24, 4, 2, 4, 20, 12, 16)
LLAMA_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def head_of(config: EagleConfig) -> EagleHead:
    return Eagle3Head(config) if isinstance(config, Eagle3Config) else Eagle1Head(config)


def bound(config: EagleConfig, seed: int = 0) -> Any:
    """A random head over a random target."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = head_of(config).eval()
        embedding, output = torch.randn(config.vocab_size, config.hidden_size), torch.randn(16, config.vocab_size)
    head.bind_target(lambda tokens: embedding[tokens], lambda states: states @ output)
    return head.requires_grad_(False)


def inputs(head: EagleHead, texts: int = 2, width: int = 7) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    features = torch.randn(texts, width, 16 * head.config.feature_count, generator=rng)
    return head.embed(torch.randint(0, 20, (texts, width), generator=rng)), head.fuse(features)


@pytest.mark.parametrize("scaling", [None, LLAMA_SCALING], ids=["plain", "llama3"])
def test_attention_is_that_of_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 500.0} | (scaling or {})
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_parameters=rope,
        max_position_embeddings=256, attn_implementation="eager",
    )  # fmt: skip
    theirs = LlamaAttention(config, layer_idx=0).eval()
    ours = Attention(AttentionSettings(32, 32, 4, 2, 8), RotarySettings(8, 500.0, 256, scaling))
    ours.load_state_dict(theirs.state_dict())
    states, positions = torch.randn(2, 9, 32), torch.arange(60, 69)[None]
    mask = torch.zeros(1, 1, 9, 9).masked_fill_(~causal_mask(9), -torch.inf)
    with torch.no_grad():
        angles = LlamaRotaryEmbedding(config)(states, positions)
        expected = theirs(states, position_embeddings=angles, attention_mask=mask)[0]
        assert torch.allclose(ours(states, positions, causal_mask(9), None), expected, atol=1e-5)


@pytest.mark.parametrize("config", [ONE, THREE], ids=["eagle1", "eagle3"])
def test_reading_in_parts_is_reading_at_once(config: EagleConfig) -> None:
    head = bound(config)
    embeddings, g = inputs(head)
    positions = torch.arange(7)[None]
    whole = head.block(embeddings, g, positions, causal_mask(7))
    buffers = KeyBuffers(2, 4, whole)
    rows = [buffers.take(), buffers.take()]
    joined, parts = JoinedKeys(), []
    for start, end in ((0, 4), (4, 5), (5, 7)):
        mask = causal_mask(end - start, start)
        here = slice(start, end)
        placed = buffers.at(rows, [start, start], end - start)
        one = head.block(embeddings[:, here], g[:, here], positions[:, here], mask, joined)
        other = head.block(embeddings[:, here], g[:, here], positions[:, here], mask, placed)
        assert torch.allclose(one, other, atol=1e-6)
        parts.append(one)
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)


def test_buffers_keep_sequences_of_different_lengths_apart() -> None:
    head = bound(THREE)
    embeddings, g = inputs(head, 3, 300)  # longer than the first buffers, so that they grow
    buffers = KeyBuffers(2, 4, g)
    rows, held = [buffers.take() for _ in range(3)], [299, 40, 0]
    order = [2, 0]  # neither neighbours nor of one length
    for index, length in enumerate(held):
        if length:
            store = buffers.at([rows[index]], [0], length)
            here = slice(0, length)
            before = torch.arange(length)[None]
            head.block(embeddings[index, None, here], g[index, None, here], before, causal_mask(length), store)
    starts = [held[index] for index in order]
    mask = torch.arange(300) <= torch.tensor(starts)[:, None]
    now = [torch.stack([source[index, held[index]] for index in order])[:, None] for source in (embeddings, g)]
    store = buffers.at([rows[index] for index in order], starts, 1)
    out = head.block(*now, torch.tensor(starts)[:, None], mask[:, None, None], store)
    for place, index in enumerate(order):
        here = slice(0, held[index] + 1)
        positions = torch.arange(held[index] + 1)[None]
        alone = head.block(embeddings[index, None, here], g[index, None, here], positions, causal_mask(held[index] + 1))
        assert torch.allclose(out[place, 0], alone[0, -1], atol=1e-5)


def test_frequencies_stay_exact_in_half_precision() -> None:
    """Trained in float32, rounded frequencies would turn far keys by another angle."""
    head, exact = bound(ONE).to(dtype=torch.bfloat16), bound(ONE)
    table = head.midlayer.self_attn.rotary.frequencies
    assert head.fc.weight.dtype == torch.bfloat16
    assert table.dtype == torch.float32 and torch.equal(table, exact.midlayer.self_attn.rotary.frequencies)


def test_a_freed_row_is_used_again() -> None:
    buffers = KeyBuffers(1, 2, torch.zeros(1))
    rows = [buffers.take() for _ in range(3)]
    buffers.give(rows[1])
    assert buffers.take() == rows[1]


def test_eagle1_by_hand() -> None:
    """One row sees only itself, so attention is o(v(x)) and the whole block can be written down."""
    head = bound(ONE)
    embeddings, g = inputs(head, 1, 1)
    layer = head.midlayer
    x = torch.cat([embeddings, g], dim=-1) @ head.fc.weight.T + head.fc.bias
    values = (x @ layer.self_attn.v_proj.weight.T).view(2, 4).repeat_interleave(2, dim=0).flatten()
    x = x + values @ layer.self_attn.o_proj.weight.T
    expected = x + layer.mlp(layer.post_attention_layernorm(x))
    out = head.block(embeddings, g, torch.tensor([[5]]))
    assert torch.allclose(out, expected, atol=1e-5)
    assert head.logits(out).shape[-1] == 20, "an EAGLE-1 head uses the target's output head"


@pytest.mark.parametrize("before", [False, True])
def test_eagle3_by_hand(before: bool) -> None:
    head = bound(replace(THREE, norm_before_residual=before))
    embeddings, g = inputs(head, 1, 1)
    layer = head.midlayer
    normed = layer.hidden_norm(g)
    read = torch.cat([layer.input_layernorm(embeddings), normed], dim=-1)
    values = (read @ layer.self_attn.v_proj.weight.T).view(2, 4).repeat_interleave(2, dim=0).flatten()
    x = (normed if before else g) + values @ layer.self_attn.o_proj.weight.T
    expected = x + layer.mlp(layer.post_attention_layernorm(x))
    out = head.block(embeddings, g, torch.tensor([[5]]))
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(head.logits(out), head.norm(expected) @ head.lm_head.weight.T, atol=1e-5)


def test_variants_of_norms_change_what_they_should() -> None:
    plain = bound(THREE)
    output = bound(replace(THREE, norm_output=True))
    embeddings, g = inputs(plain, 1, 1)
    out = plain.block(embeddings, g, torch.tensor([[0]]))
    normed = output.block(embeddings, g, torch.tensor([[0]]))
    assert torch.allclose(normed, plain.norm(out), atol=1e-6)
    assert torch.allclose(output.logits(normed), plain.logits(out), atol=1e-5)
    features = torch.randn(2, 48)
    whole, each = bound(replace(THREE, norm_before_fc=True)), bound(replace(THREE, fc_norm=True))
    rms = features.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt()
    assert torch.allclose(whole.fuse(features), whole.fc(features / rms), atol=1e-5)
    parts = features.view(2, 3, 16)
    rms = parts.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt()
    assert torch.allclose(each.fuse(features), each.fc((parts / rms).flatten(1)), atol=1e-5)


def test_a_chosen_vocabulary_is_what_the_head_predicts() -> None:
    head = bound(THREE)
    ids = torch.arange(12) + torch.arange(12) // 3
    head.choose_vocabulary(ids)
    assert torch.equal(head.target_ids, ids)
    assert head.t2d.nonzero().flatten().tolist() == ids.tolist()
    with pytest.raises(OptionError, match="12 tokens, not 3"):
        head.choose_vocabulary(torch.arange(3))


def test_the_bound_target_is_no_part_of_the_head() -> None:
    head = Eagle3Head(THREE)
    before = list(head.state_dict())
    head.bind_target(torch.nn.Embedding(20, 16), torch.nn.Linear(16, 20))
    assert list(head.state_dict()) == before


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(OptionError, match="evenly"):
        replace(ONE, num_kv_heads=3)
    with pytest.raises(OptionError, match="hidden size of its target"):
        replace(ONE, target_hidden_size=99)
    with pytest.raises(OptionError, match="1 head"):
        MedusaConfig(0, 1, 4, 4, 4)
    with pytest.raises(OptionError, match="bottleneck"):
        ExitConfig(1, 4, 0)


def test_the_usual_layers() -> None:
    assert usual_feature_layers(32) == (2, 16, 29)
    assert usual_feature_layers(30) == (2, 15, 27)
    assert all(0 <= layer <= 3 for layer in usual_feature_layers(3))


def test_untrained_medusa_heads_predict_what_the_target_does() -> None:
    heads = MedusaHeads(MedusaConfig(2, 1, 8, 20, 5))
    heads.choose_vocabulary(torch.tensor([1, 4, 9, 16, 19]))
    weight, state = torch.randn(20, 8), torch.randn(3, 8)
    heads.start_from(weight)
    assert torch.allclose(heads(state, 1)[0], (state @ weight.T)[:, [1, 4, 9, 16, 19]], atol=1e-5)
    assert heads.to_target_ids(torch.tensor([2])).tolist() == [9]


def test_an_untrained_exit_adapter_only_rescales() -> None:
    adapter = ExitAdapter(ExitConfig(1, 8, 4))
    scale, state = torch.rand(8) + 0.5, torch.randn(3, 8)
    adapter.start_from(scale)
    expected = state / state.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt() * scale
    assert torch.allclose(adapter(state), expected, atol=1e-5)
