"""All that can go wrong, in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, with the right status."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from paceline.errors import EngineClosed, OptionError, OutOfMemory, PacelineError, PromptError

LOG = logging.getLogger("paceline.serve")
INVALID, DENIED, LIMIT, SERVER = "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
TYPES = {401: DENIED, 403: DENIED, 429: LIMIT}
CLIENT_GONE = 499  # nobody reads it; it is for the log


class ApiError(HTTPException):
    """An answer that is not a text. Of FastAPI's kind: any other raised while a body is read becomes a bare 400."""

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

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, INVALID if self.status < 500 else SERVER)
        return {"error": {"message": _clean(self.message), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=dict(self.headers or {}))


def _clean(message: str) -> str:
    """A message may quote what was sent, and what was sent may hold halves of characters."""
    return message.encode("utf-8", "replace").decode("utf-8")


def as_api_error(error: BaseException) -> ApiError:
    """Whatever was raised, as the client should see it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptError):
        code = "context_length_exceeded" if "at most" in str(error) or "the cache holds" in str(error) else None
        return ApiError(400, str(error), code=code)
    if isinstance(error, OptionError):
        return ApiError(400, str(error))
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error), code="closing", headers={"Retry-After": "5"})
    if isinstance(error, OutOfMemory):
        return ApiError(500, str(error), code="out_of_memory")
    if isinstance(error, PacelineError):
        return ApiError(500, str(error), code="model_failed")
    return ApiError(500, "something broke inside the server; its log says what", code="internal_error")


def install(app: FastAPI) -> None:
    """Every error of the application takes OpenAI's shape."""

    @app.exception_handler(ApiError)
    @app.exception_handler(PacelineError)
    async def known(request: Request, error: Exception) -> JSONResponse:
        shown = as_api_error(error)
        if shown.status >= 500:
            LOG.error("failed", exc_info=error)
        return shown.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = [str(part) for part in first.get("loc", ()) if part not in ("body", "query", "path")]
        param = ".".join(place) or None
        return ApiError(400, f"{param or 'the body'}: {first.get('msg', 'is not valid')}", param=param).response()

    @app.exception_handler(AnyHTTPException)
    async def plain(request: Request, error: AnyHTTPException) -> JSONResponse:
        headers = dict(error.headers or {})
        return ApiError(error.status_code, str(error.detail), headers=headers).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()
