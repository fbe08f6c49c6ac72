"""Embeddings, driven by the openai client and compared with the model's own hidden states."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from paceline.serve.config import RequestLimits, ServerConfig
from tests.serve.running import COMPLETIONS, NAME, RunningServer, no_certificates, serving, serving_model
from tests.serve.toy_engine import ReversingEngine
from tests.support.tiny import byte_tokenizer, tiny_llama

TEXT = "to be or not to be"


@pytest.fixture(scope="module", params=["last", "cls"])
def other_server(request: pytest.FixtureRequest) -> Iterator[tuple[str, RunningServer]]:
    config = ServerConfig((NAME,), pooling=request.param)
    with serving_model(tiny_llama(), byte_tokenizer(), config, prefill_chunk_tokens=5) as server:
        yield request.param, server


def hidden_states(text: str) -> torch.Tensor:
    ids = torch.tensor([byte_tokenizer()(text).input_ids])
    with torch.inference_mode():
        return tiny_llama()(ids, output_hidden_states=True).hidden_states[-1][0]  # [tokens, hidden_size]


def unit(vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm()


def embed(server: RunningServer, **params: Any) -> Any:
    return server.client().embeddings.create(**{"model": NAME, "input": TEXT, **params})


def test_the_mean_of_the_hidden_states_is_the_embedding(tiny_server: RunningServer) -> None:
    response = embed(tiny_server, encoding_format="float")
    expected = unit(hidden_states(TEXT).mean(0))
    assert torch.allclose(torch.tensor(response.data[0].embedding), expected, atol=1e-4)
    assert response.usage.prompt_tokens == response.usage.total_tokens == len(TEXT)


@pytest.mark.slow
def test_the_flag_chooses_the_pooling_and_long_inputs_are_read_in_chunks(
    other_server: tuple[str, RunningServer],
) -> None:
    pooling, server = other_server
    expected = unit(hidden_states(TEXT)[-1 if pooling == "last" else 0])
    assert torch.allclose(torch.tensor(embed(server).data[0].embedding), expected, atol=1e-4)


@pytest.mark.slow
def test_several_inputs_strings_tokens_and_formats_agree(tiny_server: RunningServer) -> None:
    tokens = byte_tokenizer()(TEXT).input_ids
    by_text = embed(tiny_server, encoding_format="float").data[0].embedding
    by_tokens = embed(tiny_server, input=tokens).data[0].embedding  # the client asks for base64
    assert by_tokens == pytest.approx(by_text, abs=1e-6)
    response = embed(tiny_server, input=["something else", TEXT])
    assert [entry.index for entry in response.data] == [0, 1]
    assert response.data[1].embedding == pytest.approx(by_text, abs=1e-6)
    parts = {"content": [{"type": "text", "text": TEXT}]}
    mixed = tiny_server.http().post("/embeddings", json={"input": [TEXT, parts]})
    assert mixed.json()["data"][0]["embedding"] == mixed.json()["data"][1]["embedding"]


@pytest.mark.slow
def test_dimensions_cut_the_vector(tiny_server: RunningServer) -> None:
    vector = torch.tensor(embed(tiny_server, dimensions=8).data[0].embedding)
    whole = torch.tensor(embed(tiny_server).data[0].embedding)
    assert torch.allclose(vector, unit(whole[:8]), atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="32 at most"):
        embed(tiny_server, dimensions=33)


@pytest.mark.slow
def test_an_embedding_changes_no_output_and_keeps_no_blocks(tiny_server: RunningServer) -> None:
    body = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    before = tiny_server.http().post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    used = tiny_server.wait_until_idle().blocks_free
    embed(tiny_server, input=["a" * 100, "b" * 50])
    assert tiny_server.wait_until_idle().blocks_free == used
    assert tiny_server.http().post(COMPLETIONS, json=body).json()["choices"][0]["text"] == before


@pytest.mark.slow
def test_what_cannot_be_embedded_is_refused(tiny_server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="too large"):
        embed(tiny_server, input="x" * 600)
    with pytest.raises(openai.BadRequestError, match="empty"):
        embed(tiny_server, input="")
    with pytest.raises(openai.BadRequestError, match="token ids"):
        embed(tiny_server, input=[99999])
    with pytest.raises(openai.NotFoundError):
        embed(tiny_server, model="nothing")
    assert len(embed(tiny_server, input="x" * 600, extra_body={"truncate_prompt_tokens": -1}).data) == 1


def test_an_engine_without_hidden_states_says_so() -> None:
    with serving(ReversingEngine(), ServerConfig((NAME,))) as server:
        response = server.http().post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 501 and "local engine" in response.json()["error"]["message"]


class EmbeddingEngine(ReversingEngine):
    """Gives vectors. seconds: how long one takes."""

    seconds = 0.0

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        await asyncio.sleep(self.seconds)
        return [float(len(token_ids))]


@pytest.fixture(scope="module")
def small_queue() -> Iterator[RunningServer]:
    limits = RequestLimits(max_waiting=1, request_timeout=0.2)
    with serving(EmbeddingEngine(), ServerConfig((NAME,), limits=limits, max_num_seqs=1)) as server:
        yield server


@pytest.mark.slow
def test_a_batch_takes_one_place_because_its_inputs_come_one_after_the_other(small_queue: RunningServer) -> None:
    async def both() -> list[int]:
        async with httpx.AsyncClient(base_url=small_queue.url, verify=no_certificates()) as client:
            requests = [client.post("/v1/embeddings", json={"input": ["ab"] * size}) for size in (8, 1)]
            return [response.status_code for response in await asyncio.gather(*requests)]

    small_queue.engine.seconds = 0.01  # type: ignore[attr-defined]
    assert asyncio.run(both()) == [200, 200]


@pytest.mark.slow
def test_embeddings_that_take_too_long_end(small_queue: RunningServer) -> None:
    small_queue.engine.seconds = 0.15  # type: ignore[attr-defined]
    with small_queue.http() as client:
        response = client.post("/v1/embeddings", json={"input": ["ab"] * 3})
    assert response.status_code == 408 and response.json()["error"]["code"] == "timeout"


def test_ollamas_routes_give_the_same_vectors(tiny_server: RunningServer) -> None:
    vector = embed(tiny_server, encoding_format="float").data[0].embedding
    with tiny_server.http() as client:
        document = client.post("/api/embed", json={"model": NAME, "input": [TEXT, "x" * 600]}).json()
        assert document["embeddings"][0] == pytest.approx(vector, abs=1e-6) and len(document["embeddings"]) == 2
        older = client.post("/api/embeddings", json={"model": NAME, "prompt": TEXT}).json()
        assert older["embedding"] == pytest.approx(vector, abs=1e-6)
        refused = client.post("/api/embed", json={"model": NAME, "input": "x" * 600, "truncate": False})
        assert refused.status_code == 400


@pytest.mark.slow
def test_the_ollama_client_embeds(tiny_server: RunningServer) -> None:
    ollama = pytest.importorskip("ollama")
    response = ollama.Client(host=tiny_server.url).embed(model=NAME, input=[TEXT])
    assert len(response.embeddings[0]) == 32
