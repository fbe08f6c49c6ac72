"""Routes over the tokenizer: /tokenize and /detokenize as vLLM and llama.cpp take them, /apply-template, and more."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from paceline.errors import OptionError
from paceline.serve.api_chat import chat_request, given
from paceline.serve.api_shape import Document, Json
from paceline.serve.context import ServerContext
from paceline.serve.errors import ApiError
from paceline.serve.extra_fields import add_header
from paceline.serve.routes import ERROR_RESPONSES
from paceline.serve.schema import MAX_INT, ChatMessage, LenientModel
from paceline.serve.token_text import token_text

Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
# Fields of a chat that change its prompt.
TEMPLATE_FIELDS = (
    "tools", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


class TemplateRequest(LenientModel):
    """Body of /apply-template."""

    model: str | None = None
    messages: Messages


class TokenizeRequest(LenientModel):
    """Body of /tokenize. prompt or messages: as vLLM takes them; content: as llama.cpp does."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(LenientModel):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=MAX_INT)]]


class TokenizerRoutes:
    """What the routes do, in the tokenizer's thread."""

    def __init__(self, context: ServerContext) -> None:
        self._context, self._vocabulary = context, context.requests.vocabulary
        self._token_text = token_text(context.engine.tokenizer)

    def tokenize(self, body: TokenizeRequest) -> Json:
        given_inputs = given(prompt=body.prompt, messages=body.messages, content=body.content)
        if len(given_inputs) != 1:
            raise ApiError(400, "give either prompt, messages or content")
        if body.content is not None:
            return self._pieces(self._text_ids(body.content, special=bool(body.add_special)), body)
        if body.messages is not None:
            tokens = self.template_ids(body)
        else:
            tokens = self._text_ids(body.prompt or "", special=body.add_special_tokens is not False)
        spellings = [self._vocabulary.spelling(token) for token in tokens] if body.return_token_strs else None
        limit = self._context.requests.max_model_len
        return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": spellings}

    def _text_ids(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise OptionError("the text holds half a character (a lone surrogate); no tokenizer reads it") from None
        return self._vocabulary.encode(text, special=special)

    def _pieces(self, tokens: list[int], body: TokenizeRequest) -> Json:
        """llama.cpp's answer: ids, or ids with what they add to the text."""
        if not body.with_pieces:
            return {"tokens": tokens}
        return {"tokens": [{"id": token, "piece": self._piece(token)} for token in tokens]}

    def _piece(self, token: int) -> str | list[int]:
        """The text of a token, or its bytes where they are part of a character."""
        text, raw = self.text([token]), self._token_text.token_bytes(token)
        return text if raw is None or bytes(raw) == text.encode("utf-8", "replace") else raw

    def template_ids(self, body: TokenizeRequest | TemplateRequest) -> list[int]:
        """Token ids of messages through the model's template. Fields that the template takes go with them."""
        fields: dict[str, Any] = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
        shown = {name: fields[name] for name in TEMPLATE_FIELDS if name in fields}
        messages = [message.model_dump(exclude_unset=True) for message in body.messages or ()]
        chat = chat_request({"messages": messages, **shown})
        self._context.extra_fields.ignored(chat)  # refuses what would change the prompt and is not supported
        return self._context.requests.chat_prompt(chat)

    def text(self, tokens: list[int]) -> str:
        """Characters with the special tokens. Raises OptionError for ids that are no tokens."""
        size = self._context.engine.info.vocab_size
        if any(token >= size for token in tokens):
            raise OptionError(f"token ids are from 0 to {size - 1}")
        return self._token_text.decode(tokens)


def add_tokenizer_routes(routes: APIRouter, context: ServerContext) -> None:
    api = TokenizerRoutes(context)

    @routes.post("/tokenize", responses=ERROR_RESPONSES, response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a prompt, or of chat messages through the model's template."""
        context.requests.check_model(body.model)
        ignored = context.extra_fields.ignored(_without_template(body))
        return add_header(Document(await context.tokenized(api.tokenize, body)), ignored)

    @routes.post("/detokenize", responses=ERROR_RESPONSES, response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Document:
        """The text of token ids, in vLLM's spelling and, where no model is named, in llama.cpp's too."""
        context.requests.check_model(body.model)
        text = await context.tokenized(api.text, body.tokens)
        return Document({"prompt": text, **({} if body.model else {"content": text})})

    @routes.post("/apply-template", responses=ERROR_RESPONSES, response_model=None)
    async def apply_template(body: TemplateRequest) -> Document:
        """The prompt that the chat template makes of messages."""
        context.requests.check_model(body.model)
        tokens = await context.tokenized(api.template_ids, body)
        return Document({"prompt": await context.tokenized(api.text, tokens)})

    @routes.get("/tokenizer_info", response_model=None)
    async def tokenizer_info() -> Document:
        """The tokenizer's class, its special tokens and the chat template."""
        return Document(await context.tokenized(lambda _: context.requests.vocabulary.description(), None))


def _without_template(body: TokenizeRequest) -> TokenizeRequest:
    """The body without the fields that go on to the template, which are checked there."""
    extra = {name: value for name, value in (body.model_extra or {}).items() if name not in TEMPLATE_FIELDS}
    return TokenizeRequest.model_construct(**extra)
