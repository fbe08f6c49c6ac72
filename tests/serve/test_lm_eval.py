"""lm-evaluation-harness against the server: loglikelihoods equal the model's own, and tasks run from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import COMPLETIONS, NAME, RunningServer
from tests.support.tiny import byte_tokenizer, tiny_llama

lm_eval = pytest.importorskip("lm_eval", reason="pip install 'lm_eval[api]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CONTINUATIONS = [("the cat sat on", " the mat"), ("abc", "d"), ("to be or not", " to be: that is"), ("x", "yz" * 30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(path)
    return path


def client_options(server: RunningServer, folder: Path) -> dict[str, Any]:
    return {
        "model": NAME,
        "base_url": f"{server.url}{COMPLETIONS}",
        "tokenizer": str(folder),
        "tokenizer_backend": "huggingface",
        "max_length": 500,
        "max_retries": 1,
        "max_gen_toks": 12,
    }


def own_score(context: str, continuation: str) -> tuple[float, bool]:
    """The log-likelihood of a continuation and whether it is greedy, by the model alone."""
    import torch

    before = byte_tokenizer()(context).input_ids
    after = byte_tokenizer()(continuation).input_ids
    with torch.inference_mode():
        logits = tiny_llama()(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].float()
    scores = torch.log_softmax(logits, dim=-1)
    total = sum(float(row[token]) for row, token in zip(scores, after))
    return total, scores.argmax(-1).tolist() == after


def greedy_continuation(server: RunningServer, context: str) -> str:
    """A continuation that is greedy by construction: the model's own, as far as it is text."""
    body = {"model": NAME, "prompt": context, "temperature": 0, "max_tokens": 1, "regex": "[ -~]"}
    return str(server.http().post(COMPLETIONS, json=body).json()["choices"][0]["text"])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_loglikelihoods_are_the_models_own(tiny_server: RunningServer, folder: Path, batch_size: int) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(**client_options(tiny_server, folder), batch_size=batch_size)
    pairs = [*CONTINUATIONS, ("once upon", greedy_continuation(tiny_server, "once upon"))]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    for (context, continuation), (total, is_greedy) in zip(pairs, model.loglikelihood(requests)):
        expected, expected_greedy = own_score(context, continuation)
        assert total == pytest.approx(expected, abs=1e-3)
        assert is_greedy == expected_greedy


def test_generation_stops_where_the_task_says(tiny_server: RunningServer, folder: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(**client_options(tiny_server, folder))
    greedy = {"until": ["\n\n"], "allowed_token_ids": byte_tokenizer()("abcd").input_ids}
    requests = [Instance("generate_until", {}, ("abcabc", dict(greedy)), 0)]
    whole = model.generate_until(requests)[0]
    assert len(whole) == 12 and set(whole) <= set("abcd")
    cut = model.generate_until([Instance("generate_until", {}, ("abcabc", {**greedy, "until": [whole[4:6]]}), 0)])[0]
    assert cut == whole[: whole.index(whole[4:6])]


def test_a_task_runs_from_end_to_end(tiny_server: RunningServer, folder: Path, tmp_path: Path) -> None:
    documents = [{"question": "two and two", "choices": [" four", " five"], "answer": 0}] * 3
    data = tmp_path / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    results = lm_eval.simple_evaluate(
        model="local-completions", model_args=client_options(tiny_server, folder), tasks=[task], bootstrap_iters=0
    )
    scores = [own_score("two and two", choice)[0] for choice in (" four", " five")]
    assert results["results"]["sums"]["acc,none"] == (1.0 if scores[0] > scores[1] else 0.0)
