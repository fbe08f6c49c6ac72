"""Kinds of OpenAI-compatible servers, and what each takes and tells beyond OpenAI's API."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engines.http.client import Json

MORE_SAMPLING = frozenset({"top_k", "min_p", "repetition_penalty", "ignore_eos"})
REQUEST_FIELDS = {  # of a Request, with the names that vLLM and paceline have for them
    "stop_token_ids": "stop_token_ids",
    "include_stop": "include_stop_str_in_output",
    "skip_special_tokens": "skip_special_tokens",
    "bad_words": "bad_words",
    "allowed_token_ids": "allowed_token_ids",
}


@dataclass(frozen=True, slots=True)
class ServerKind:
    """One kind of server.

    takes_token_ids  a prompt may be a list of token ids
    fields           fields of a request beyond OpenAI's
    always           what every request asks for: token ids and speculation statistics in the answer
    with_logprobs    what a request for log-probabilities asks for besides
    regex_field      where a regular expression goes, by path; None: it takes none
    takes_method     a request may choose how to draft
    request_fields   names of REQUEST_FIELDS that it takes
    """

    name: str
    takes_token_ids: bool = False
    fields: frozenset[str] = frozenset()
    always: Json = field(default_factory=dict)
    with_logprobs: Json = field(default_factory=dict)
    regex_field: tuple[str, ...] | None = None
    takes_method: bool = False
    request_fields: frozenset[str] = frozenset()


TOKEN_ID_NAMES: Json = {"return_tokens_as_token_ids": True}
ALL_FIELDS = frozenset(REQUEST_FIELDS)
PACELINE = ServerKind(
    "paceline", True, MORE_SAMPLING | {"min_tokens"}, {"x_paceline": True, "return_token_ids": True}, TOKEN_ID_NAMES,
    ("structured_outputs", "regex"), takes_method=True, request_fields=ALL_FIELDS,
)  # fmt: skip
LLAMA_CPP = ServerKind("llama.cpp", True, MORE_SAMPLING)
KINDS = {
    kind.name: kind
    for kind in (
        PACELINE,
        LLAMA_CPP,
        ServerKind(
            "vllm", True, MORE_SAMPLING | {"min_tokens"}, {"return_token_ids": True}, TOKEN_ID_NAMES,
            ("structured_outputs", "regex"), request_fields=ALL_FIELDS,
        ),
        ServerKind(
            "sglang", True, MORE_SAMPLING | {"min_tokens"}, {"return_spec_tokens_details": True}, {}, ("regex",)
        ),
        ServerKind("ollama"),
        ServerKind("tgi"),
        ServerKind("openai"),
    )
}  # fmt: skip
OWNERS = {"paceline": "paceline", "llamacpp": "llama.cpp", "vllm": "vllm", "sglang": "sglang", "library": "ollama"}


def kind_of_owner(owner: str) -> ServerKind:
    """The kind of a server by the `owned_by` of its models; one that is not known has OpenAI's API alone."""
    return KINDS[OWNERS.get(owner, "openai")]
