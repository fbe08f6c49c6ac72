"""Request bodies. Unknown fields of a LenientModel are kept for serve/extra_fields.py; elsewhere they are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from paceline.config import MAX_DRAFT_TOKENS
from paceline.serve.chat_schema import MAX_CALLS, ChatTemplateParams, ToolCallParam
from paceline.serve.output_schema import LogprobCount, OutputParams, ResponseFormatParam
from paceline.serve.schema_models import LenientModel, StrictModel

MAX_INT = 1 << 31
SEED_LIMIT = 1 << 63
Stop = Annotated[str, StringConstraints(max_length=256)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MAX_INT)]
# system, developer, user, assistant and tool, or another one that the model's template knows
Role = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class ContentPart(LenientModel):
    """A part of a message; only text is supported. A refusal, of an earlier answer, is its text."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refusal_as_text(cls, part: Any) -> Any:
        is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
        return {"type": "text", "text": part.get("refusal")} if is_refusal else part


Content = str | list[ContentPart]


class ChatMessage(LenientModel):
    """One message of a conversation."""

    role: Role
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCallParam], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class SpeculativeParams(StrictModel):
    """Speculation for this request. num_draft_tokens: 0 turns it off, "auto" uses the draft-length policy."""

    method: str | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | Literal["auto"] | None = None


class PredictionParam(StrictModel):
    """Draft tokens from the client: text that the output is expected to repeat."""

    type: Literal["content"]
    content: Content


class StreamOptions(LenientModel):
    """What a stream carries beside the output."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class KvTransferParams(LenientModel):
    """What a server that has read the prompt passes on. prompt_token_ids: taken as they are, not the messages."""

    prompt_token_ids: TokenIds | None = None


class CommonParams(OutputParams):
    """What chat completions and completions have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    truncation_side: Literal["left", "right"] | None = Field(default=None, description="where a prompt is cut")
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-SEED_LIMIT, le=SEED_LIMIT - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    prediction: PredictionParam | None = None
    speculative: SpeculativeParams | None = None
    response_format: ResponseFormatParam | None = None
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None
    use_beam_search: bool | None = Field(default=None, description="the n likeliest continuations, not sampled ones")
    length_penalty: Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)] | None = None
    x_paceline: bool | None = Field(default=None, description="add speculation statistics to the response")
    # Accepted and ignored: they do not change the output.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def asked_tokens(self) -> int | None:
        """The length that the request itself asks for; None: it leaves it open."""
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """An empty string stops nothing."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(string for string in strings if string)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatRequest(CommonParams, ChatTemplateParams):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(max_length=4096)]
    prompt_token_ids: TokenIds | None = Field(default=None, description="the prompt itself, in place of the messages")
    max_completion_tokens: Count | None = None
    logprobs: Annotated[bool, Field(strict=False)] | None = None  # "true" too, as some clients write it
    top_logprobs: LogprobCount | None = None
    kv_transfer_params: KvTransferParams | None = None
    echo: bool | None = Field(default=None, description="the answer begins with the final message that it continues")
    timings_per_token: bool | None = Field(default=None, description="add llama.cpp's timings")
    verbose: bool | None = Field(default=None, description="add the prompt as the model reads it, as llama.cpp does")

    @property
    def echoed_message(self) -> ChatMessage | None:
        """The message that the answer continues and repeats."""
        last = self.messages[-1] if self.messages else None
        is_continued = self.echo and self.continue_final_message
        return last if is_continued and last is not None and last.role == "assistant" else None

    @property
    def given_prompt(self) -> list[int] | None:
        """The prompt as token ids, where the request brings it along."""
        handed_over = self.kv_transfer_params.prompt_token_ids if self.kv_transfer_params else None
        return self.prompt_token_ids or handed_over

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(CommonParams):
    """Body of /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=2048)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=2048)]
    )
    suffix: str | None = None
    echo: bool | None = None
    logprobs: LogprobCount | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    max_completion_tokens: Count | None = None
    add_special_tokens: bool | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
