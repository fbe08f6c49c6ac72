"""Errors as responses: OpenAI's {"error": {"message", "type", "param", "code"}}, with a status by exception type."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from paceline.errors import (
    CapabilityError,
    ContextLengthExceeded,
    EngineClosed,
    EngineFailed,
    OptionError,
    OutOfMemory,
    PacelineError,
)

LOG = logging.getLogger("paceline.serve")
INVALID_REQUEST, SERVER_ERROR = "invalid_request_error", "server_error"
ERROR_TYPES = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_error"}
NOT_IMPLEMENTED = 501
CLIENT_GONE = 499  # for the log alone: the client has disconnected
RETRY_SOON = {"Retry-After": "5"}
EXPECTED = "Input should be "  # how pydantic says what a field must be


class ApiError(HTTPException):
    """An error response. FastAPI turns any other exception raised while it reads a body into a bare 400."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers or {})
        self.status, self.message, self.param, self.code = status, message, param, code
        self.counts: dict[str, int | None] = {}  # of a prompt that is too long, in llama.cpp's spelling
        self.asked_tokens: int | None = None  # of an answer that is too long for what its prompt leaves

    @property
    def body(self) -> dict[str, Any]:
        default_type = INVALID_REQUEST if self.status < 500 else SERVER_ERROR
        # A message can quote the request, which can hold lone surrogates.
        message = self.message.encode("utf-8", "replace").decode("utf-8")
        error_type = ERROR_TYPES.get(self.status, default_type)
        return {"error": {"message": message, "type": error_type, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> JSONResponse:
        """path: that of the request; the clients of other APIs read errors of another shape."""
        body = next((shape(self) for prefix, shape in ERROR_SHAPES.items() if path.startswith(prefix)), self.body)
        return JSONResponse(body, self.status, headers=dict(self.headers or {}))


# Error bodies of other APIs by the start of their paths; the modules of those routes add theirs.
ERROR_SHAPES: dict[str, Callable[[ApiError], dict[str, Any]]] = {}


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """The response to one type of exception."""

    status: int
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


STATUS_BY_TYPE: dict[type[PacelineError], ErrorStatus] = {
    ContextLengthExceeded: ErrorStatus(400, "context_length_exceeded"),
    OptionError: ErrorStatus(400),
    EngineClosed: ErrorStatus(503, "shutting_down", RETRY_SOON),
    CapabilityError: ErrorStatus(501, "not_supported"),
    EngineFailed: ErrorStatus(503, "engine_failed", RETRY_SOON),
    OutOfMemory: ErrorStatus(500, "out_of_memory"),
    PacelineError: ErrorStatus(500, "model_failed"),
}


def as_api_error(error: BaseException) -> ApiError:
    """The response to an exception: that of the nearest class in STATUS_BY_TYPE, else a 500 without details."""
    if isinstance(error, ApiError):
        return error
    for error_type in type(error).__mro__:
        if error_type in STATUS_BY_TYPE:
            entry = STATUS_BY_TYPE[error_type]
            api_error = ApiError(entry.status, str(error), code=entry.code, headers=entry.headers)
            if isinstance(error, ContextLengthExceeded):
                api_error.counts = {"n_prompt_tokens": error.num_tokens, "n_ctx": error.limit}
                api_error.asked_tokens = error.asked_tokens
            return api_error
    return ApiError(500, "the server failed; its log has the details", code="internal_error")


def log_failure(api_error: ApiError, cause: BaseException) -> None:
    """Log the cause of an error that is the server's own; what it says it does not do is no failure."""
    if api_error.status >= 500 and api_error.status != NOT_IMPLEMENTED:
        LOG.error("request failed", exc_info=cause)


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """What pydantic says of a field.

    path   where it is in the body
    kinds  of a field that may be of several kinds: the one that the value was checked as
    """

    path: tuple[str, ...]
    kinds: tuple[str, ...]
    text: str
    code: str | None


def invalid_field(problems: Sequence[Any], body: Any = None) -> ApiError:
    """The first field that is not valid; of several kinds that it may be, what is wrong with the nearest one.

    body  the document that was checked; without it the names of kinds stay in the paths
    """
    candidates = [field_problem(problem, body) for problem in problems]
    first = candidates[0].path
    candidates = [candidate for candidate in candidates if candidate.path[: len(first)] == first]
    counts = Counter(candidate.kinds for candidate in candidates)
    nearest = max(candidates, key=lambda candidate: (len(candidate.path), -counts[candidate.kinds]))
    param = ".".join(nearest.path) or None
    text = _expected([candidate.text for candidate in candidates if candidate.path == nearest.path])
    return ApiError(400, f"{param or 'the body'}: {text}", param=param, code=nearest.code)


def _expected(texts: list[str]) -> str:
    """What a field must be. A limit says more than the kinds that the value is not of."""
    limits = [text for text in texts if not text.startswith(EXPECTED)]
    return limits[0] if limits else EXPECTED + " or ".join(dict.fromkeys(text.removeprefix(EXPECTED) for text in texts))


def field_problem(problem: Any, body: Any = None) -> FieldProblem:
    """A problem with its path in the body, into which pydantic puts the names of kinds too."""
    parts: Sequence[Any] = problem.get("loc", ())
    parts = parts[1:] if parts and parts[0] in ("body", "query", "path") else parts
    path: list[str] = []
    kinds: list[str] = []
    is_known = body is not None
    for number, part in enumerate(parts, 1):
        is_inside = part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)
        is_missing = number == len(parts) and problem.get("type") == "missing"
        (path if is_inside or is_missing or not is_known else kinds).append(str(part))
        body = body[part] if is_inside else body
    return FieldProblem(tuple(path), tuple(kinds), problem.get("msg", "is not valid"), problem.get("type"))


def install_handlers(app: FastAPI) -> None:
    """Give every error of the application OpenAI's shape."""

    @app.exception_handler(ApiError)
    @app.exception_handler(PacelineError)
    async def expected(request: Request, error: Exception) -> JSONResponse:
        api_error = as_api_error(error)
        log_failure(api_error, error)
        return api_error.response(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return invalid_field(error.errors(), error.body).response(request.url.path)

    @app.exception_handler(StarletteHTTPException)
    async def http(request: Request, error: StarletteHTTPException) -> JSONResponse:
        api_error = ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        return api_error.response(request.url.path)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response(request.url.path)
