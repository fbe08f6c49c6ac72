"""Libraries over several APIs, each on its happy path. They are optional: what is not installed is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.serve.config import ServerConfig
from tests.serve.running import NAME, RunningServer, serving
from tests.serve.toy_engine import ReversingEngine

pytestmark = pytest.mark.slow  # importing them takes seconds
MESSAGES: list[Any] = [{"role": "user", "content": "abcdef"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(ReversingEngine(), ServerConfig((NAME,))) as running_server:
        yield running_server


# litellm names its provider before the model.
PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": "", "ollama": "", "ollama_chat": ""}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_completes_and_streams(server: RunningServer, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    params = {
        "model": f"{provider}/{NAME}",
        "messages": MESSAGES,
        "api_base": server.url + PROVIDERS[provider],
        "api_key": "none",
        "max_tokens": 20,
    }
    response = litellm.completion(**params)
    text = response.choices[0].message.content
    assert "fedcba" in text and response.usage.completion_tokens == len(text)  # ollama/ writes a prompt of its own
    chunks = list(litellm.completion(**params, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_litellm_asks_for_responses(server: RunningServer) -> None:
    litellm = pytest.importorskip("litellm")
    response = litellm.responses(
        model=f"openai/{NAME}", input="abcdef", api_base=f"{server.url}/v1", api_key="none", max_output_tokens=20
    )
    assert response.output[0].content[0].text == "fedcba"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_asks_and_streams(server: RunningServer, use_responses_api: bool) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        model=NAME, base_url=f"{server.url}/v1", api_key="none", use_responses_api=use_responses_api, max_retries=0
    )
    answer = model.invoke([("human", "abcdef")])
    assert text_of(answer) == "fedcba" and answer.usage_metadata["output_tokens"] == 6
    assert "".join(text_of(part) for part in model.stream("abcdef")) == "fedcba"
    assert [text_of(part) for part in model.batch(["ab", "cd"])] == ["ba", "dc"]


def text_of(message: Any) -> str:
    """A method in some versions, a string in others; a string that can be called in between."""
    return str(message.text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_langchain_embeds(tiny_server: RunningServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=NAME, base_url=f"{tiny_server.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    vectors = embeddings.embed_documents(["to be", "or not"])
    assert [len(vector) for vector in vectors] == [32, 32]
