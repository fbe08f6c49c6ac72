"""A chat request before it is generated: its prompt, the functions it offers, and how its outputs are read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.core.protocols import Tokenizer
from paceline.core.types import ReasoningSpan, Request, StructuredOutput
from paceline.errors import OptionError, PromptError
from paceline.hub.tokenizer import ChatPrompt
from paceline.serve.chat_messages import (
    content_text,
    instructions_as_user_text,
    messages_with_tools,
    template_messages,
)
from paceline.serve.chat_schema import AllowedTools, NamedTool, ToolParam
from paceline.serve.chat_template import ChatTemplate
from paceline.serve.errors import ApiError
from paceline.serve.output_pieces import Parse
from paceline.serve.output_syntax import OpenReasoning, OutputSyntax
from paceline.serve.reasoning import ReasoningFormat, content_only
from paceline.serve.schema import ChatMessage, ChatRequest
from paceline.serve.structured_fields import structured_output
from paceline.serve.token_text import TokenText
from paceline.serve.tools.grammar import answer_or_calls, answer_schema, forced_calls
from paceline.serve.tools.offer import ANY_ARGUMENTS, ToolFunction, ToolOffer

TAIL_TOKENS = 48  # of a prompt: enough to see whether it ends with the mark that opens the reasoning
RESERVED = frozenset(  # what the template gets in other ways
    {
        "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "padding",
        "continue_final_message", "tokenize", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", "self",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What a chat request comes to.

    grammar     of an output that must be tool calls, or either such or an answer in JSON
    reasoning   where its outputs may reason before they answer
    shows_special_tokens  the parser needs to see them
    """

    token_ids: list[int]
    syntax: OutputSyntax
    grammar: StructuredOutput | None = None
    reasoning: ReasoningSpan | None = None
    shows_special_tokens: bool = False

    def applied(self, request: Request) -> Request:
        """The engine request with what the plan adds."""
        structured_output = self.grammar or request.structured_output
        limited = self.reasoning is not None and self.reasoning.max_tokens is not None
        return replace(
            request,
            structured_output=structured_output,
            reasoning=self.reasoning if structured_output is not None or limited else None,
            skip_special_tokens=request.skip_special_tokens and not self.shows_special_tokens,
        )


class ChatPlanner:
    """Plans the chat requests of one server. Raises ApiError, OptionError or PromptError."""

    def __init__(self, tokenizer: Tokenizer, token_text: TokenText, template: ChatTemplate) -> None:
        self._tokenizer, self._token_text, self._template = tokenizer, token_text, template

    def plan(self, body: ChatRequest) -> ChatPlan:
        """Everything about one request."""
        check_last_messages(body)
        offer = tool_offer(body)
        if offer is not None and offer.is_forced and self._template.tools is None:
            message = "this server runs with --tool-parser none: tool_choice can be auto or none"
            raise ApiError(400, message, param="tool_choice")
        token_ids = self._token_ids(body, offer)
        reasoning = self._open_reasoning(body, token_ids)
        syntax = self._syntax(body, offer, reasoning)
        return ChatPlan(
            token_ids,
            syntax,
            self._call_grammar(offer, body),
            self._span(body, reasoning, token_ids),
            syntax.parse is not None and self._has_special_markers(),
        )

    def token_ids(self, body: ChatRequest) -> list[int]:
        """The prompt alone."""
        return self._token_ids(body, tool_offer(body))

    def messages_ids(self, messages: list[ChatMessage]) -> list[int]:
        """The prompt of messages without anything else."""
        return self._encode(ChatPrompt(template_messages(messages, self._template.tools)))

    # --- the prompt ---------------------------------------------------------------------------------------------------

    def _token_ids(self, body: ChatRequest, offer: ToolOffer | None) -> list[int]:
        if body.given_prompt is not None:
            return given_prompt(body)
        if not body.messages:
            raise ApiError(400, "messages is empty; there is nothing to answer", param="messages")
        takes_tools = self._template.takes_tools
        messages = (
            template_messages(body.messages, self._template.tools)
            if takes_tools
            else messages_with_tools(body.messages, offer)
        )
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        prompt = ChatPrompt(
            messages,
            tools=list(offer.documents) if offer is not None and takes_tools else None,
            documents=body.documents or None,
            template=self._template.override,
            variables={**self._reasoning_variables(body), **template_variables(body)},
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
        )
        return self._encode(prompt)

    def _encode(self, prompt: ChatPrompt) -> list[int]:
        """A tokenizer whose template is not known takes the messages alone."""
        if not self._template.text:
            return self._tokenizer.encode(prompt.messages)
        try:
            return self._tokenizer.encode(prompt)
        except PromptError as refusal:
            messages = instructions_as_user_text(prompt.messages)
            if messages == prompt.messages:
                raise
            try:
                return self._tokenizer.encode(replace(prompt, messages=messages))
            except PromptError:
                raise refusal from None

    def _reasoning_variables(self, body: ChatRequest) -> dict[str, object]:
        """What templates call the effort, and whether to reason."""
        variables: dict[str, object] = {}
        if body.effort is not None and self._template.knows("reasoning_effort"):
            variables["reasoning_effort"] = body.effort
        if body.asks_to_reason is not None:
            names = [name for name in ("enable_thinking", "thinking") if self._template.knows(name)]
            variables |= dict.fromkeys(names, body.asks_to_reason)
        return variables

    # --- the outputs --------------------------------------------------------------------------------------------------

    def _syntax(self, body: ChatRequest, offer: ToolOffer | None, reasoning: OpenReasoning | None) -> OutputSyntax:
        tools = self._template.tools if offer is not None else None
        parse: Parse | None = tools.parse(offer) if tools is not None and offer is not None else None
        if reasoning is not None:
            parse = self._with_reasoning(reasoning, parse)
        return OutputSyntax(
            parse,
            reasoning,
            shows_reasoning=body.shows_reasoning,
            offers_tools=tools is not None,
            is_forced=offer is not None and offer.is_forced,
            is_parallel=offer is None or offer.is_parallel,
            id_length=tools.id_length if tools is not None else None,
        )

    def _with_reasoning(self, reasoning: OpenReasoning, parse: Parse | None) -> Parse | None:
        tools = self._template.tools
        if reasoning.reasoning_format.is_tagged:
            calls = tools.markers[:1] if tools is not None and parse is not None else ()
            return reasoning.reasoning_format.parse(reasoning.is_open, parse or content_only, calls)
        return parse or (tools.parse(ToolOffer(())) if tools is not None else None)

    def _open_reasoning(self, body: ChatRequest, token_ids: list[int]) -> OpenReasoning | None:
        known = self._template.reasoning
        if known is None:
            return None
        if body.continue_final_message and body.messages:
            text = content_text(body.messages[-1].content or "")
            is_open = text.rfind(known.begin) > text.rfind(known.end)
        else:
            is_open = self._tail(token_ids).endswith(known.begin)
        closing_token = self._token_text.added_tokens.get(known.end)
        return OpenReasoning(known, is_open, self._token_text.decode, closing_token)

    def _tail(self, token_ids: list[int]) -> str:
        return self._token_text.decode(token_ids[-TAIL_TOKENS:]).rstrip()

    def _span(
        self, body: ChatRequest, reasoning: OpenReasoning | None, token_ids: list[int]
    ) -> ReasoningSpan | None:
        """Where the engine lets an output reason; None: it does not, or the prompt has already closed it."""
        if reasoning is None or self._tail(token_ids).endswith(reasoning.reasoning_format.end):
            return None
        known: ReasoningFormat = reasoning.reasoning_format
        return ReasoningSpan(
            known.begin,
            known.end,
            tuple(self._token_text.encode(known.begin)),
            tuple(self._token_text.encode(known.forced_end or known.end)),
            reasoning.is_open,
            body.max_reasoning_tokens,
        )

    def _call_grammar(self, offer: ToolOffer | None, body: ChatRequest) -> StructuredOutput | None:
        """None: the model is free to call, or may not."""
        tools = self._template.tools
        if offer is None or tools is None:
            return None
        try:
            markers = {text: token for text, token in self._token_text.added_tokens.items() if text in tools.markers}
            if offer.is_forced:
                return forced_calls(offer, tools.layout, markers)
            schema = answer_schema(structured_output(body.response_format, body))
            return None if schema is None else answer_or_calls(schema, offer, tools.layout, markers)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"the parameters of a function cannot be read: {error}") from error

    def _has_special_markers(self) -> bool:
        tools, reasoning = self._template.tools, self._template.reasoning
        markers = [*(tools.markers if tools else ()), *((reasoning.begin, reasoning.end) if reasoning else ())]
        return any(special in marker for special in self._token_text.special_tokens for marker in markers)


def given_prompt(body: ChatRequest) -> list[int]:
    """The token ids that a request brings along. Raises ApiError for options of the template, which is not used."""
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents"):
        if body.prompt_token_ids and getattr(body, name) is not None:
            raise ApiError(400, f"{name} is for the chat template, which prompt_token_ids replaces", param=name)
    return list(body.given_prompt or ())


def template_variables(body: ChatRequest) -> dict[str, object]:
    """What the request gives the template itself."""
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in RESERVED or not name.isidentifier():
            message = f"chat_template_kwargs cannot set {name[:40]!r}"
            raise ApiError(400, message, param="chat_template_kwargs")
    return dict(variables)


def check_last_messages(body: ChatRequest) -> None:
    """Raise ApiError for a chat that ends with two answers: which of them the next one continues is not said."""
    if [message.role for message in body.messages[-2:]] == ["assistant", "assistant"]:
        message = "the last two messages are both from the assistant; join them, or put a user message between them"
        raise ApiError(400, message, param="messages")


def tool_offer(body: ChatRequest) -> ToolOffer | None:
    """The functions that a request offers; None: no tool may be called."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools: the request offers none", param="tool_choice")
        return None
    if choice == "none":
        return None
    names = chosen_names(choice)
    tools = [tool for tool in body.tools if names is None or tool.function.name in names]
    for name in (names or set()) - {tool.function.name for tool in tools}:
        raise ApiError(400, f"tool_choice names {name[:64]!r}, which tools does not have", param="tool_choice")
    is_named = isinstance(choice, NamedTool)
    is_forced = is_named or choice == "required"
    is_forced = is_forced or (isinstance(choice, AllowedTools) and choice.allowed_tools.mode == "required")
    functions = [ToolFunction(tool.function.name, tool.function.parameters or ANY_ARGUMENTS) for tool in tools]
    is_parallel = body.parallel_tool_calls is not False and not is_named
    return ToolOffer(tuple(functions), tuple(tool_document(tool) for tool in body.tools), is_forced, is_parallel)


def chosen_names(choice: object) -> set[str] | None:
    """The functions that tool_choice names; None: all of them."""
    if isinstance(choice, NamedTool):
        return {choice.function.name}
    if isinstance(choice, AllowedTools):
        return {tool.function.name for tool in choice.allowed_tools.tools}
    return None


def tool_document(tool: ToolParam) -> dict[str, object]:
    """A tool as templates take it: fields that are not set are left out, but for the parameters."""
    function = {"parameters": dict(ANY_ARGUMENTS), **tool.function.model_dump(exclude_none=True)}
    order = ("name", "description", "parameters")
    ordered = {name: function[name] for name in order if name in function}
    return {"type": "function", "function": ordered | {k: v for k, v in function.items() if k not in ordered}}
