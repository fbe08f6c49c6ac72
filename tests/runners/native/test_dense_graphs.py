"""Architectures beyond Llama through the fused kernels: against float64, and a node's bits at every width.

Without a GPU the kernels run through Triton's interpreter: the same code, slowly.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from paceline.core.types import DraftInput, ModelOutput, Row
from paceline.runners.native import NativeRunner
from tests.runners.native.fused import eager_graphs
from tests.runners.native.models import DENSE, WINDOWED, tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (150, 17)  # one sequence has a full chunk of context and one begins, the other is short
TREES = (([5, 6, 7, 8], [-1, 0, 0, 2]), ([9, 10, 11], [-1, 0, 1]))
VARIANTS: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in (*DENSE, *WINDOWED)] + [
    ("mistral", {"sliding_window": 16}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"hidden_act": "gelu"}),
]
IDS = ["-".join([kind, *changes]) for kind, changes in VARIANTS]
# Kinds whose parts others of the list have, too: through the interpreter they would only take time.
REPEATED = ("arcee", "cohere", "ernie4_5", "glm", "gpt_neox", "ministral", "olmo3", "phi3", "seed_oss", "stablelm")
FEWER = [(kind, changes) for kind, changes in VARIANTS if kind not in REPEATED]


def fused(kind: str, **changes: Any) -> NativeRunner:
    runner = NativeRunner.of_model(tiny(kind, **changes).to(DEVICE), kind, kv_cache_tokens=1024)
    assert all(layer.can_fuse for layer in runner.model.layers)
    runner.decode_graphs = eager_graphs(runner)
    return runner


def after_trees(runner: NativeRunner, prompts: list[torch.Tensor]) -> ModelOutput:
    caches = [runner.new_cache() for _ in prompts]
    runner.forward([Row.chain(cache, prompt) for cache, prompt in zip(caches, prompts)], last_only=True)
    rows = [Row(cache, torch.tensor(tokens), parents) for cache, (tokens, parents) in zip(caches, TREES)]
    return runner.forward(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), FEWER, ids=["-".join([kind, *changes]) for kind, changes in FEWER])
def test_trees_of_a_batch_agree_with_float64(kind: str, changes: dict[str, Any]) -> None:
    exact = NativeRunner.of_model(tiny(kind, torch.float64, **changes).to(DEVICE), kind, kv_cache_tokens=1024)
    exact.decode_graphs = exact.prefill_graphs = None
    prompts = [torch.randint(0, 101, (length,)) for length in LENGTHS]
    ours, reference = after_trees(fused(kind, **changes), prompts), after_trees(exact, prompts)
    assert (ours.logits.double() - reference.logits).norm() / reference.logits.norm() < 1e-5
    assert ours.best is not None and torch.equal(ours.best, reference.logits.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm4", "granite", "olmo2", "starcoder2", *WINDOWED])
def test_a_node_is_the_same_bits_at_every_width(kind: str) -> None:
    runner = fused(kind)
    cache = runner.new_cache()
    runner.forward([Row.chain(cache, torch.randint(0, 101, (126,)))], last_only=True)
    tokens = [3, 4, 5, 6]
    together = runner.forward([Row.chain(cache, tokens)]).logits.clone()
    runner.truncate(cache, 126)
    alone = torch.cat([runner.forward([Row.chain(cache, [token])]).logits.clone() for token in tokens])
    assert torch.equal(together, alone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["granite", "starcoder2", "gemma3_text"])  # scales, layer norms, windows
def test_a_drafting_graph_drafts_what_single_steps_would(kind: str) -> None:
    runner, prompt = fused(kind), list(range(5, 14))
    drafted = runner.draft([DraftInput(runner.new_cache(), prompt)], 3)
    runner.decode_graphs = None
    cache, steps = runner.new_cache(), list[int]()
    output = runner.forward([Row.chain(cache, prompt)], last_only=True)
    for _ in range(3):
        steps.append(int(output.logits[0].argmax()))
        output = runner.forward([Row.chain(cache, steps[-1:])])
    assert drafted is not None and drafted.tokens[0].tolist() == steps


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=IDS)
def test_captured_passes_round_no_more_than_eager_ones(kind: str, changes: dict[str, Any]) -> None:
    model = tiny(kind, torch.bfloat16, **changes).to("cuda")
    ours, plain = (NativeRunner.of_model(model, kind, kv_cache_tokens=2048) for _ in range(2))
    exact = NativeRunner.of_model(deepcopy(model).double(), kind, kv_cache_tokens=2048)
    assert ours.decode_graphs is not None
    plain.decode_graphs = exact.decode_graphs = None
    prompts = [torch.randint(0, 101, (length,)) for length in LENGTHS]
    output = [after_trees(runner, prompts).logits.double() for runner in (ours, plain, exact)]
    off = [float((logits - output[2]).norm() / output[2].norm()) for logits in output[:2]]
    assert off[0] < 1.5 * off[1]
