"""P-EAGLE heads: files of speculators are read and written, and one pass drafts what a plain computation says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

from paceline.drafting.eagle import Eagle
from paceline.errors import OptionError, WeightsError
from paceline.heads.peagle import PEagleConfig, PEagleHead
from paceline.heads.registry import load_head, save_head
from tests.heads import checkpoints
from tests.heads.checkpoints import HEAD_DIM, HEADS, KV_HEADS, WIDTH, write
from tests.support.build import sequence, tiny_engine
from tests.support.drafter_exactness import check_greedy, check_sampled, toy

MASK = 200
LAYERS = 3


def tensors() -> dict[str, Tensor]:
    """EAGLE-3's first layer, two of Llama's, and the learnt state."""
    named = checkpoints.eagle3("layers.0.")
    for index in range(1, LAYERS):
        further = checkpoints.layer(f"layers.{index}.", WIDTH)
        named |= {name: value * (0.8 + 0.1 * index) for name, value in further.items()}
        named[f"layers.{index}.input_layernorm.weight"] = torch.full((WIDTH,), 1.1)
    return named | {"mask_hidden": checkpoints.random(1, 1, 3 * WIDTH)}


def written(folder: Path, held: dict[str, Tensor] | None = None, **config: Any) -> Path:
    settings = {"speculators_model_type": "peagle", "mask_token_id": MASK, "norm_before_residual": False}
    return write(folder, "speculators", tensors() if held is None else held, **{**settings, **config})


def test_published_files_load_and_survive_writing(tmp_path: Path) -> None:
    head = load_head(written(tmp_path / "old"), PEagleHead)
    assert (head.config.num_layers, head.mask_token_id) == (LAYERS, MASK)
    assert torch.equal(head.mask_hidden, tensors()["mask_hidden"])
    save_head(head, tmp_path / "new")
    again = load_head(tmp_path / "new", PEagleHead)
    assert again.config == head.config
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize("name", ["mask_hidden", "layers.1.self_attn.o_proj.weight", "layers.2.input_layernorm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    held = {other: value for other, value in tensors().items() if other != name}
    with pytest.raises(WeightsError, match=f"{name.replace('.', '[.]')} is missing"):
        load_head(written(tmp_path, held), PEagleHead)


@pytest.mark.parametrize("token", [None, 5000])
def test_a_mask_token_that_is_none_is_refused(token: int | None, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=f"mask_token_id in config.json is {token}"):
        load_head(written(tmp_path, mask_token_id=token), PEagleHead)


def test_it_drafts_no_trees() -> None:
    with pytest.raises(OptionError, match="leave nodes at 0"):
        Eagle(toy_head(), toy(), nodes=4)


# --- what it drafts ---------------------------------------------------------------------------------------------------


class Reference:
    """The whole pass in float64, from scratch."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self.held = {name: value.double() for name, value in tensors().items()}
        self.embedding = embedding.double()
        self.ids = (torch.arange(checkpoints.REDUCED) + tensors()["d2t"]).tolist()

    def draft(self, features: Tensor, ids: list[int], num_tokens: int) -> list[int]:
        masks = self.held["mask_hidden"][0].expand(num_tokens - 1, -1)
        g = torch.cat([features.double(), masks]) @ self.held["fc.weight"].T
        embedded = self.embedding[[*ids[1:], *[MASK] * (num_tokens - 1)]]
        x = g + self.attention("layers.0.", torch.cat([self.norm("layers.0.input_layernorm", embedded),
                                                       self.norm("layers.0.hidden_norm", g)], dim=-1))  # fmt: skip
        x = x + self.mlp("layers.0.", x)
        for index in range(1, LAYERS):
            prefix = f"layers.{index}."
            x = x + self.attention(prefix, self.norm(f"{prefix}input_layernorm", x))
            x = x + self.mlp(prefix, x)
        logits = self.norm("norm", x[-num_tokens:]) @ self.held["lm_head.weight"].T
        return [self.ids[best] for best in logits.argmax(dim=-1).tolist()]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.held[f"{name}.weight"]

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up, down = (self.held[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = self.norm(f"{prefix}post_attention_layernorm", x)
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def attention(self, prefix: str, x: Tensor) -> Tensor:
        q, k, v, o = (self.held[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkvo")
        rows, group = x.shape[0], HEADS // KV_HEADS
        queries, keys, values = ((x @ weight.T).view(rows, -1, HEAD_DIM) for weight in (q, k, v))
        keys, values = turned(keys).repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", turned(queries), keys) / HEAD_DIM**0.5
        weights = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1) @ o.T


def turned(heads: Tensor) -> Tensor:
    frequencies = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = torch.arange(heads.shape[0], dtype=torch.float64)[:, None, None] * frequencies
    low, high = heads.chunk(2, dim=-1)
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)


@pytest.mark.slow
def test_draft_tokens_are_those_of_a_float64_reference(tiny_folder: Path, tmp_path: Path) -> None:
    """Through the engine that a user gets, in a batch of different lengths."""
    engine = tiny_engine(tiny_folder, method="eagle", draft_model=str(written(tmp_path)), num_draft_tokens=4)
    made, propose = [], engine.parts.drafter.propose

    def recorded(seqs: Any, num_draft_tokens: Any) -> Any:
        trees = propose(seqs, num_draft_tokens)
        made.extend((list(seq.ids), tree.tokens.tolist()) for seq, tree in zip(seqs, trees) if len(tree))
        return trees

    engine.parts.drafter.propose = recorded  # type: ignore[method-assign]
    engine.run([sequence(prompt, 9) for prompt in ([5, 7, 9], [250], list(range(40)))])
    assert len(made) > 15
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()  # one that no test has used
    reference = Reference(tmp_path, model.get_input_embeddings().weight.detach())
    for ids, tokens in made[::2]:
        with torch.no_grad():
            states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0] for layer in (0, 1, 2)], dim=-1)
        assert reference.draft(features, ids, len(tokens)) == tokens
    assert json.loads((tmp_path / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]


# --- exactness --------------------------------------------------------------------------------------------------------


def toy_head(vocab: int = 4) -> PEagleHead:
    """A random head for the toy, of two layers; it cannot predict the last token."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = PEagleHead(PEagleConfig(vocab, 8, 2, 1, 2, vocab, vocab - 1, vocab, num_layers=2, mask_token_id=1))
        torch.nn.init.normal_(head.mask_hidden)
    return head.eval().requires_grad_(False)


@pytest.mark.slow
def test_greedy_outputs_are_unchanged() -> None:
    check_greedy(Eagle(toy_head(), toy()))


@pytest.mark.slow
def test_tokens_of_one_pass_carry_the_q_they_were_drawn_from() -> None:
    """chi² over twelve thousand tokens; fails a correct drafter with probability 1e-6."""
    assert check_sampled(Eagle(toy_head(), toy()), samples=12_000, copies=40).new_tokens >= 12_000
