"""llama.cpp's own routes: /completion, /infill, /chat/completions without /v1, /props and /slots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from paceline import __version__
from paceline.core.sampling import SamplingParams
from paceline.serve.api_chat import checked
from paceline.serve.api_llama_cpp_output import LlamaChatShape, LlamaRequest, LlamaShape
from paceline.serve.api_shape import Json
from paceline.serve.context import ServerContext
from paceline.serve.errors import ApiError
from paceline.serve.fill_in_middle import OtherFile
from paceline.serve.routes import ERROR_RESPONSES, chat_response, completion_response, tokenized_for
from paceline.serve.schema import ChatRequest, CompletionRequest, LenientModel

# llama.cpp's names for fields of ours.
RENAMED_FIELDS = {
    "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "n_probs": "logprobs",
    "return_tokens": "return_token_ids",
}  # fmt: skip
# What says how the server works, not what it writes.
OWN_FIELDS = frozenset(
    {
        "cache_prompt", "id_slot", "n_keep", "n_indent", "t_max_predict_ms", "timings_per_token", "return_progress",
        "post_sampling_probs", "response_fields", "repeat_last_n", "min_keep", "n_cmpl", "prompt", "model",
        "input_prefix", "input_suffix", "input_extra", "samplers", "penalty_last_n", "mirostat_tau", "mirostat_eta",
        "n_discard", "logit_bias",
    }
)  # fmt: skip
MAX_BIAS = 100.0
BiasPair = Annotated[list[int | float | bool | str], Field(min_length=2, max_length=2)]
BiasPairs = Annotated[list[BiasPair], Field(max_length=1024)]
BiasNames = Annotated[dict[str, int | float | bool], Field(max_length=1024)]


class LlamaParams(LenientModel):
    """What llama.cpp's two completion routes have in common.

    logit_bias  token ids or strings, in pairs or by name
    n_predict   0: the prompt is read, so that the next request finds it in the prefix cache
    """

    n_predict: Annotated[int, Field(ge=-2, le=1 << 31)] | None = None
    stream: bool | None = None
    response_fields: list[str] | None = None
    post_sampling_probs: bool | None = None
    logit_bias: BiasPairs | BiasNames | None = None

    @property
    def fields(self) -> Json:
        """Fields of a completion, but for its prompt and its biases."""
        body = self.model_dump(exclude_unset=True, exclude_none=True)
        fields = {RENAMED_FIELDS.get(name, name): value for name, value in body.items() if name not in OWN_FIELDS}
        if isinstance(fields.get("max_tokens"), int) and fields["max_tokens"] < 0:
            del fields["max_tokens"]  # no limit
        if isinstance(fields.get("seed"), int) and fields["seed"] < 0:
            del fields["seed"]  # any
        if fields.get("logprobs"):
            fields["return_tokens_as_token_ids"] = True  # the answer has ids and texts
        else:
            fields.pop("logprobs", None)
        if self.stream:
            fields |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
        return fields


class LlamaCompletionRequest(LlamaParams):
    """Body of /completion. A prompt is a string, token ids, a list that mixes both, or a list of prompts."""

    prompt: str | dict[str, Any] | Annotated[list[Any], Field(min_length=1, max_length=1 << 20)]


class ExtraFile(LenientModel):
    """A file that the gap may refer to. Editors add when they read it, and more."""

    filename: str
    text: str


class InfillRequest(LlamaParams):
    """Body of /infill. prompt: how the text in the middle begins."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=256)] | None = None
    prompt: str | None = None


class LlamaApi:
    """What the routes do."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def completion(self, request: Request, body: LlamaCompletionRequest) -> Response:
        prompts = await tokenized_for(self._context, request, partial(prompt_ids, self._context), body.prompt)
        return await self._respond(request, body, prompts, len(prompts) if is_several(body.prompt) else None)

    async def infill(self, request: Request, body: InfillRequest) -> Response:
        files = tuple(OtherFile(file.filename, file.text) for file in body.input_extra or ())
        middle = self._context.requests.middle
        fill = partial(middle.prompt, suffix=body.input_suffix, files=files, start=body.prompt or "")
        prompt = await tokenized_for(self._context, request, fill, body.input_prefix)
        return await self._respond(request, body, [prompt], end_ids=middle.end_ids)

    async def _respond(
        self,
        request: Request,
        body: LlamaParams,
        prompts: list[list[int]],
        num_prompts: int | None = None,
        end_ids: Sequence[int] = (),
    ) -> Response:
        context = self._context
        biases = await context.tokenized(partial(token_biases, context), body.logit_bias)
        fields = {**body.fields, **({"logit_bias": biases} if biases else {})}
        if end_ids:
            fields["stop_token_ids"] = [*(fields.get("stop_token_ids") or ()), *end_ids]
        own = {"prompt": prompts, **({"return_token_ids": True} if len(prompts) > 1 or fields.get("n") else {})}
        completion = checked(CompletionRequest, {**fields, **self._limited(fields, prompts), **own})
        if body.post_sampling_probs:
            check_untruncated(context.requests.sampling(completion))
        llama_request = LlamaRequest(
            context.config.served_model_names[0],
            await context.tokenized(partial(prompt_texts, context), prompts),
            [len(prompt) for prompt in prompts],
            {**context.requests.sampling_defaults, **fields},
            body.response_fields or [],
            context.formatter.token_text,
            context.engine.info.eos_token_ids,
            context.requests.max_model_len,
            bool(body.post_sampling_probs),
            num_prompts,
        )
        shape, default_tokens = LlamaShape(llama_request), context.config.limits.chat_max_tokens
        return await completion_response(context, request, completion, shape, default_tokens, reads_prompt=True)

    def _limited(self, fields: Json, prompts: list[list[int]]) -> Json:
        """n_predict as far as the context goes: an output that fills it ends there."""
        space = self._context.requests.max_model_len - max(len(prompt) for prompt in prompts)
        limit = fields.get("max_tokens")
        return {"max_tokens": space} if isinstance(limit, int) and 0 < space < limit else {}


def check_untruncated(sampling: SamplingParams) -> None:
    """Raise ApiError where tokens are not drawn from the probabilities that the engine reports."""
    truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if sampling.temperature != 1 or truncates:
        message = "post_sampling_probs needs temperature 1, top_k 0, top_p 1 and min_p 0; leave it out for others"
        raise ApiError(400, message, param="post_sampling_probs")


def token_biases(context: ServerContext, biases: Any) -> dict[str, float]:
    """Biases by token id. The bias of a string is that of each of its tokens; false forbids a token."""
    pairs = biases.items() if isinstance(biases, dict) else biases or ()
    by_token: dict[str, float] = {}
    for key, value in pairs:
        if not isinstance(key, int | str) or isinstance(value, str):
            raise ApiError(400, "logit_bias is pairs of a token id or a string and a number", param="logit_bias")
        number = -MAX_BIAS if value is False else value
        bias = float(min(max(number, -MAX_BIAS), MAX_BIAS))  # a whole number may be too large for a float
        by_token |= dict.fromkeys(_bias_tokens(context, key, is_name=isinstance(biases, dict)), bias)
    return by_token


def _bias_tokens(context: ServerContext, key: int | str, *, is_name: bool) -> list[str]:
    """The ids that a key stands for. is_name: JSON has only strings as names, so digits are an id."""
    if isinstance(key, int) or (is_name and key.isascii() and key.isdigit()):
        return [str(key)]
    return [str(token) for token in context.requests.vocabulary.encode(key, special=False)]


def add_llama_cpp_routes(routes: APIRouter, context: ServerContext) -> None:
    api = LlamaApi(context)

    @routes.post("/completion", responses=ERROR_RESPONSES, response_model=None)
    async def llama_completion(request: Request, body: LlamaCompletionRequest) -> Response:
        """The continuation of a prompt in llama.cpp's spelling. The model's name is not read: there is one."""
        return await api.completion(request, body)

    @routes.post("/completions", include_in_schema=False, response_model=None)
    async def either_completion(request: Request, body: dict[str, Any]) -> Response:
        """OpenAI's clients name a model, and get its shape; llama.cpp's do not, and get theirs."""
        if body.get("model") is not None:
            return await completion_response(context, request, checked(CompletionRequest, body))
        return await api.completion(request, checked(LlamaCompletionRequest, body))

    @routes.post("/infill", responses=ERROR_RESPONSES, response_model=None)
    async def infill(request: Request, body: InfillRequest) -> Response:
        """The text between a prefix and a suffix, where the model has fill-in-the-middle tokens."""
        return await api.infill(request, body)

    @routes.post("/chat/completions", include_in_schema=False, response_model=None)
    async def llama_chat(request: Request, body: ChatRequest) -> Response:
        """A chat as llama.cpp's clients know it: a last message of the assistant is continued."""
        shape = LlamaChatShape(body, context.formatter.prompt_text)
        return await chat_response(context, request, prefilled(body), shape)

    _add_status_routes(routes, context)


def prefilled(body: ChatRequest) -> ChatRequest:
    """The chat; one whose last message is the assistant's asks for the rest of that message."""
    is_open = body.continue_final_message is None and body.add_generation_prompt is None and not body.given_prompt
    last = body.messages[-1] if body.messages else None
    if not is_open or last is None or last.role != "assistant" or last.tool_calls:
        return body
    return body.model_copy(update={"continue_final_message": True, "add_generation_prompt": False})


def is_several(prompt: Any) -> bool:
    """Whether a list holds prompts. A list with a number in it is one prompt."""
    return isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt)


def prompt_ids(context: ServerContext, prompt: Any) -> list[list[int]]:
    """Token ids of every prompt."""
    return [_ids(context, part) for part in (prompt if is_several(prompt) else [prompt])]


def prompt_texts(context: ServerContext, prompts: list[list[int]]) -> list[str]:
    """Prompts as the model reads them."""
    return [context.formatter.prompt_text(prompt) for prompt in prompts]


def _ids(context: ServerContext, prompt: Any) -> list[int]:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise ApiError(400, "this server runs a text model; leave out multimodal_data", param="prompt")
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str):
        return context.engine.tokenizer.encode(prompt)
    if not isinstance(prompt, list):
        raise ApiError(400, "a prompt is a string, or a list of token ids and strings", param="prompt")
    ids: list[int] = []
    for part in prompt:
        if isinstance(part, str):
            ids += context.requests.vocabulary.encode(part, special=False)
        elif isinstance(part, int) and not isinstance(part, bool):
            ids.append(part)
        else:
            raise ApiError(400, "a prompt is a string, or a list of token ids and strings", param="prompt")
    return ids


def _add_status_routes(routes: APIRouter, context: ServerContext) -> None:
    limit, num_seqs = context.requests.max_model_len, context.config.max_num_seqs

    @routes.get("/props")
    async def props() -> Json:
        """What llama.cpp's clients ask about the server."""
        vocabulary = context.requests.vocabulary
        special = vocabulary.special_tokens
        return {
            "default_generation_settings": {"n_ctx": limit, "params": context.requests.sampling_defaults},
            "total_slots": num_seqs,
            "model_alias": context.config.served_model_names[0],
            "model_path": context.engine.info.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": vocabulary.chat_template,
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "build_info": f"paceline-{__version__}",
        }

    @routes.get("/slots", response_model=None)
    async def running_sequences() -> list[Json]:
        """One entry for each sequence that can run at a time; sequences have no fixed place."""
        num_running = context.engine.stats().running
        return [{"id": index, "n_ctx": limit, "is_processing": index < num_running} for index in range(num_seqs)]
