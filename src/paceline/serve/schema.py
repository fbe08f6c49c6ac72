"""What clients may send. Unknown fields are refused, so that a misspelt one is noticed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from paceline.config import LARGEST_K

MOST_TOKENS = 1 << 31
SEED = 1 << 63
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MOST_TOKENS)]], Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


class Strict(BaseModel):
    """No guessing about types: "5" is not 5."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None


class Speculative(Strict):
    """How this one text is guessed for. num_draft_tokens: 0 is off, "auto" as many as pay."""

    method: str | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=LARGEST_K)] | Literal["auto"] | None = None


class Prediction(Strict):
    """A draft the client brings."""

    type: Literal["content"]
    content: Content


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Strict):
    name: Annotated[str, StringConstraints(max_length=64)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class CommonParams(Strict):
    """What chat and plain completions have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-SEED, lt=SEED)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    prediction: Prediction | None = None
    speculative: Speculative | None = None
    response_format: ResponseFormat | None = None
    x_paceline: bool | None = Field(default=None, description="put figures about guessing into the reply")
    # Taken and not acted upon: they change nothing about the text.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(CommonParams):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Tools are not supported; a client that sends none explicitly means the same as one that is silent.
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(CommonParams):
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=2048)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=2048)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: None = None


class TokenizeRequest(Strict):
    """One of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
