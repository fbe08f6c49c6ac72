"""The parts of a chat request that concern tools and reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from paceline.serve.schema_models import LenientModel, StrictModel

MAX_TOOLS, MAX_CALLS = 512, 512
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]+$", max_length=128)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenCount = Annotated[int, Field(ge=0, le=1 << 31)]


class FunctionParam(LenientModel):
    """A function that the model may call. parameters: the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(LenientModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionParam


class CalledFunction(LenientModel):
    """A function that an earlier answer has called. arguments: JSON, as text or as it is."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallParam(LenientModel):
    """A call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class FunctionReference(LenientModel):
    """The name of an offered function."""

    name: str


class NamedTool(LenientModel):
    """A call of this function and no other."""

    type: Literal["function"]
    function: FunctionReference


class AllowedToolsParam(StrictModel):
    """Some of the offered tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(StrictModel):
    """Some of the offered tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsParam


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class ThinkingParam(LenientModel):
    """Whether to reason, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: TokenCount | None = None


class ReasoningParam(LenientModel):
    """How to reason. exclude: the answer does not carry the reasoning."""

    effort: Effort | None = None
    max_tokens: TokenCount | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ChatTemplateParams(LenientModel):
    """What a request says about tools, reasoning and the chat template."""

    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningParam | None = None
    include_reasoning: bool | None = None
    thinking: ThinkingParam | None = None
    thinking_budget: TokenCount | None = Field(default=None, description="tokens of the reasoning at most")
    thinking_token_budget: TokenCount | None = Field(default=None, description="another name of thinking_budget")
    thinking_budget_tokens: TokenCount | None = Field(default=None, description="another name of thinking_budget")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def effort(self) -> str | None:
        """The reasoning effort, however it is spelled."""
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)

    @property
    def max_reasoning_tokens(self) -> int | None:
        """The thinking budget, however it is spelled."""
        given = (
            self.thinking_budget,
            self.thinking_token_budget,
            self.thinking_budget_tokens,
            self.thinking.budget_tokens if self.thinking else None,
            self.reasoning.max_tokens if self.reasoning else None,
        )
        return next((count for count in given if count is not None), None)

    @property
    def asks_to_reason(self) -> bool | None:
        """Whether the answer should begin with reasoning; None: the template's default."""
        if self.thinking and self.thinking.type in ("enabled", "disabled"):
            return self.thinking.type == "enabled"
        if self.reasoning and self.reasoning.enabled is not None:
            return self.reasoning.enabled
        if self.effort is not None:
            return self.effort != "none"
        return False if self.max_reasoning_tokens == 0 else None

    @property
    def shows_reasoning(self) -> bool:
        excluded = bool(self.reasoning and self.reasoning.exclude)
        return self.include_reasoning is not False and not excluded
