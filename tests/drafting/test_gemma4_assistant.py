"""Gemma 4's assistant: draft tokens as transformers' own, from the keys that the target has stored; exact outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.errors import CapabilityError, PairError
from tests.support import chi2
from tests.support.build import sequence, tiny_engine
from tests.support.drafter_exactness import FALSE_ALARM, chi_squared
from tests.support.families import VOCABULARY, Variant, tiny_family_config, write_family
from tests.support.tiny import write_tiny_model

pytest.importorskip("transformers.models.gemma4_assistant")
PROMPTS = [[5, 7, 9, 11, 200, 31], [250], list(range(40))]  # the last is past the window of 16
LAYERS = ["sliding_attention", "full_attention"]


def write_assistant(folder: Path, *, ordered: bool = False) -> Path:
    """A random assistant of two layers for the tiny target."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    text = tiny_family_config("gemma4_text", {}).to_dict()
    text |= {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "layer_types": LAYERS}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2}
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=32, use_ordered_embeddings=ordered, num_centroids=22,
        centroid_intermediate_top_k=4,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma4AssistantForCausalLM(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.25)
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of each kind: the last of each is what the assistant reads."""
    changes = {"num_hidden_layers": 4, "layer_types": LAYERS * 2, "num_kv_shared_layers": 0}
    return write_family(Variant("gemma4_text", changes=changes), tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assistant(tmp_path_factory.mktemp("assistant"))


def reference_draft(target: Any, assistant: Any, ids: list[int], num_tokens: int) -> list[int]:
    """transformers' own drafting loop, over keys of one pass without a cache."""
    with torch.no_grad():
        read = torch.tensor([ids[:-1]])
        output = target(read, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
        state, token = output.hidden_states[-1][:, -1:], torch.tensor([[ids[-1]]])
        tokens: list[int] = []
        for _ in range(num_tokens):
            inputs = torch.cat([target.get_input_embeddings()(token), state], dim=-1)
            step = assistant(
                inputs_embeds=inputs,
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=output.shared_kv_states,
            )
            token, state = step.logits.argmax(dim=-1), step.last_hidden_state
            tokens.append(int(token))
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
def test_draft_tokens_are_those_of_transformers(ordered: bool, target: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_assistant(tmp_path, ordered=ordered)
    engine = tiny_engine(target, method="mtp", draft_model=str(folder), num_draft_tokens=3)
    made, propose = [], engine.parts.drafter.propose

    def recorded(seqs: Any, num_draft_tokens: Any) -> Any:
        trees = propose(seqs, num_draft_tokens)
        made.extend((list(seq.ids), tree.tokens.tolist()) for seq, tree in zip(seqs, trees) if len(tree))
        return trees

    engine.parts.drafter.propose = recorded  # type: ignore[method-assign]
    engine.run([sequence(list(prompt), 9) for prompt in PROMPTS])
    assert len(made) > 15
    models = [AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval() for place in (target, folder)]
    for ids, tokens in made[::2]:
        assert reference_draft(*models, ids, len(tokens)) == tokens


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_what_the_target_alone_generates(temperature: float, target: Path, assistant: Path) -> None:
    """Sampled under `coupled`, whose output depends on its seed alone, drafted or not."""
    settings = {"max_new_tokens": 12, "ignore_eos": True, "temperature": temperature, "seed": 3}
    with SpeculativeDecoder(
        str(target), draft_model=str(assistant), method="mtp", num_draft_tokens=3, acceptance="coupled"
    ) as decoder:
        drafted = decoder.generate(PROMPTS, **settings)
        plain = decoder.generate(PROMPTS, **settings, num_draft_tokens=0)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert all(result.stats.drafted for result in drafted)


# --- the distribution of sampled outputs ------------------------------------------------------------------------------

TOKENS = (5, 7, 9, 11)  # a bias leaves no others, so that target and assistant prefer the same ones
BIAS = dict.fromkeys(TOKENS, 60.0)
NEW_TOKENS, SEQUENCES, TEMPERATURE = 3, 400, 2.0


def with_wrong_q(drafter: Drafter) -> None:
    """Mutant: the drafter claims that its tokens were drawn from all tokens alike."""
    propose = drafter.propose

    def claimed(seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        trees = propose(seqs, num_draft_tokens)
        return [
            tree if tree.probs is None else replace(tree, probs=torch.full_like(tree.probs, 1 / VOCABULARY))
            for tree in trees
        ]

    drafter.propose = claimed  # type: ignore[method-assign]


def sampled_chi_squared(target: Path, assistant: Path, change: Callable[[Drafter], None] = lambda _: None) -> float:
    """chi² of all outputs after one prompt over its limit: above 1 with probability FALSE_ALARM where all is right."""
    engine = tiny_engine(target, method="mtp", draft_model=str(assistant), num_draft_tokens=2, max_num_seqs=200)
    change(engine.parts.drafter)
    sampling = [SamplingParams(TEMPERATURE, logit_bias=BIAS, seed=seed) for seed in range(SEQUENCES)]
    seqs = engine.run([sequence(list(PROMPTS[0]), NEW_TOKENS, params) for params in sampling])
    counts = Counter[tuple[int, int]]()
    paths: list[tuple[int, ...]] = sorted({seq_path[:at] for seq_path in outputs(seqs) for at in range(NEW_TOKENS)})
    for path in outputs(seqs):
        counts.update((paths.index(path[:at]), TOKENS.index(path[at])) for at in range(NEW_TOKENS))
    accepted = sum(seq.stats.accepted for seq in seqs)
    assert accepted > 0.05 * SEQUENCES, "hardly any draft token was accepted: this shows little"
    statistic, freedom = chi_squared([expected(target, path) for path in paths], counts)
    limit = float(chi2.isf(FALSE_ALARM, freedom))
    print(f"chi² {statistic:.1f} of {freedom} degrees of freedom, limit {limit:.1f}, {accepted} draft tokens accepted")
    return statistic / limit


def outputs(seqs: list[Sequence]) -> list[tuple[int, ...]]:
    return [tuple(seq.generated) for seq in seqs]


@cache
def expected(target: Path, path: tuple[int, ...]) -> list[float]:
    """Probabilities of the four tokens after the prompt and a path, by transformers in one pass."""
    with torch.no_grad():
        logits = _loaded(target)(torch.tensor([[*PROMPTS[0], *path]])).logits[0, -1]
    return (logits[list(TOKENS)].double() / TEMPERATURE).softmax(-1).tolist()


@cache
def _loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.slow
def test_sampled_outputs_are_distributed_as_the_target_says(target: Path, assistant: Path) -> None:
    """Fails a correct drafter with probability 1e-6; one that claims another q than it drew from does not pass."""
    assert sampled_chi_squared(target, assistant) < 1
    assert sampled_chi_squared(target, assistant, with_wrong_q) > 1


def test_a_target_that_is_not_its_own_is_refused(assistant: Path, tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path))
    with pytest.raises(CapabilityError, match="share the keys and values"):
        SpeculativeDecoder(folder, draft_model=str(assistant), method="mtp")
    with pytest.raises(PairError, match="264 tokens"):
        SpeculativeDecoder(folder, draft_model=str(assistant), method="mtp", runner="hf")
