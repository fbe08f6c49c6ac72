"""A server behind a proxy that puts a prefix before every path."""

from __future__ import annotations

import openai
import pytest

from paceline.errors import OptionError
from paceline.serve.config import NetworkConfig, ServerConfig
from tests.serve.running import NAME, serving
from tests.serve.toy_engine import ReversingEngine

KEY = "a-key-of-the-test"


@pytest.mark.slow
def test_every_path_is_served_with_the_prefix_and_without_it() -> None:
    network = NetworkConfig(api_keys=(KEY,), root_path="/llm")
    with serving(ReversingEngine(), ServerConfig((NAME,), network=network)) as server:
        for prefix in ("", "/llm"):
            url = f"{server.url}{prefix}/v1"
            client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
            completion = client.completions.create(model=NAME, prompt="abc", max_tokens=3)
            assert completion.choices[0].text == "cba"
            stranger = openai.OpenAI(base_url=url, api_key="another-key", max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                stranger.completions.create(model=NAME, prompt="abc", max_tokens=3)
        with server.http() as http:
            assert http.get("/llm/health").status_code == http.get("/health").status_code == 200
            assert http.get("/llm").text == http.get("/").text
            assert http.get("/llmx/health", headers={"Authorization": f"Bearer {KEY}"}).status_code == 404


@pytest.mark.parametrize("path", ["llm", "/", "http://x"])
def test_a_prefix_is_a_path(path: str) -> None:
    with pytest.raises(OptionError, match="--root-path"):
        NetworkConfig(root_path=path)
