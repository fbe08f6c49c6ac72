"""What a server offers, asked once before the scenarios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.doctor.client import RequestFailed, RequestRefused, ServerClient
from paceline.doctor.engines import ENGINES, EngineTraits, engine_of
from paceline.doctor.query import Query, chat, completion
from paceline.errors import OptionError

NEAR_TIE = 0.25  # difference of log-probabilities; servers round in 16 bits
CONTEXT = 2048  # of a server that does not say
PROBE = "The tide goes out and the tide comes in. One apple, two apples, three apples. " * 4


@dataclass(frozen=True, slots=True)
class TestedServer:
    """A server under test, the one taken to be right if there is one, and what they offer."""

    __test__ = False  # a name for pytest to leave alone

    client: ServerClient
    against: ServerClient | None
    engine: EngineTraits
    has_chat: bool
    has_completions: bool
    has_logprobs: bool
    context: int = CONTEXT
    chars_per_token: float = 3.0
    near_tie: float = NEAR_TIE

    @property
    def drift_limit(self) -> float:
        """How far apart rounding may put one log-probability."""
        return max(0.02, 2 * self.near_tie)

    def fitting(self, chars: int, tokens: int) -> int:
        """At most so many characters, and no more than fit beside an answer of so many tokens."""
        space = (self.context - tokens - 64) * self.chars_per_token * 0.8
        return max(100, min(chars, int(space)))


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the user says of the servers."""

    url: str
    against: str | None = None
    model: str | None = None
    api_key: str | None = None
    key_variable: str | None = None
    engine: str | None = None
    near_tie: float | None = None


async def connect(options: ServerOptions) -> TestedServer:
    """Ask what is served and which requests are taken. Raises EngineClosed or OptionError."""
    client = _client(options, options.url)
    against = None if options.against is None else _client(options, options.against)
    listed = await client.models()
    client.model = options.model or _first_model(listed, options.url)
    if against is not None:
        others = await against.models()
        against.model = options.model or _first_model(others, str(options.against))
    entry = next((item for item in listed if item.get("id") == client.model), {})
    engine = ENGINES[options.engine] if options.engine else engine_of(str(entry.get("owned_by", "")))
    return await _probed(client, against, engine, entry, options.near_tie)


def _client(options: ServerOptions, url: str) -> ServerClient:
    return ServerClient(url, options.model or "", options.api_key, options.key_variable)


def _first_model(models: list[dict[str, Any]], url: str) -> str:
    if not models or "id" not in models[0]:
        raise OptionError(f"{url} lists no model; name one with --model")
    return str(models[0]["id"])


async def _probed(
    client: ServerClient,
    against: ServerClient | None,
    engine: EngineTraits,
    entry: dict[str, Any],
    near_tie: float | None,
) -> TestedServer:
    chat_query, completion_query = _probes()
    refusals = [await _refusal(client, query) for query in (chat_query, completion_query)]
    has_chat, has_completions = (refusal is None for refusal in refusals)
    if not has_chat and not has_completions:
        message = f"{client.url} takes neither chat completions nor completions ({refusals[0]})"
        raise OptionError(f"{message}; is it OpenAI-compatible?")
    query = chat_query if has_chat else completion_query
    own = entry.get("x_paceline") or {}
    return TestedServer(
        client,
        against,
        engine,
        has_chat,
        has_completions,
        await _gives_logprobs(client, query),
        _context(entry, own),
        await _chars_per_token(client, query),
        near_tie if near_tie is not None else float(own.get("near_tie_logprob", NEAR_TIE)),
    )


def _probes() -> list[Query]:
    return [chat([{"role": "user", "content": PROBE}], max_tokens=2), completion(PROBE, max_tokens=2)]


def _context(entry: dict[str, Any], own: dict[str, Any]) -> int:
    """vLLM and SGLang say max_model_len, llama.cpp n_ctx among other things."""
    meta = entry.get("meta") or {}
    declared = entry.get("max_model_len") or own.get("max_model_len") or meta.get("n_ctx")
    return int(declared) if declared else CONTEXT


async def _refusal(client: ServerClient, query: Query) -> str | None:
    """Why the server does not answer; None: it does."""
    try:
        await client.ask(query)
    except (RequestRefused, RequestFailed) as error:
        return str(error)
    return None


async def _gives_logprobs(client: ServerClient, query: Query) -> bool:
    try:
        return bool((await client.ask(query.with_logprobs())).tokens)
    except (RequestRefused, RequestFailed):
        return False


async def _chars_per_token(client: ServerClient, query: Query) -> float:
    count = (await client.ask(query)).usage.prompt_tokens
    return len(PROBE) / count if count else 3.0
