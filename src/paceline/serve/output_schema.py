"""Fields of a request that shape its output, and what of it the response shows, as other servers spell them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from paceline.serve.schema_models import LenientModel

MAX_TOKEN_ID = 1 << 31
MAX_LIST = 4096
Word = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenIdList = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(max_length=MAX_LIST)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_LIST)]
LogprobCount = Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)]  # -1: the whole vocabulary, where the server allows it
Schema = dict[str, Any] | str  # a JSON schema, as it is or as text


class JsonSchemaParam(LenientModel):
    """A JSON schema the output must match."""

    name: Annotated[str, StringConstraints(max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormatParam(LenientModel):
    """What the output must be. The schema of a JSON object may stand beside its type."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]
    json_schema: JsonSchemaParam | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    pattern: str | None = None
    grammar: str | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputsParam(LenientModel):
    """What the output must match, as vLLM spells it: one of these."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class OutputParams(LenientModel):
    """Fields that OpenAI's API does not have."""

    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    stop_token_ids: TokenIdList | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[Word], Field(max_length=MAX_LIST)] | None = None
    allowed_token_ids: TokenIdList | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # tokenizers of today have no such spaces
    prompt_logprobs: LogprobCount | None = None
    logprob_token_ids: Annotated[TokenIdList, Field(min_length=1)] | None = Field(
        default=None, description="tokens whose log-probabilities are shown in place of the likeliest ones"
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # What the output must match: one of these, or response_format.
    structured_outputs: StructuredOutputsParam | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None  # there is one
    grammar: str | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
