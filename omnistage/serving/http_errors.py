"""Every failure as OpenAI's error object and the status that omnistage.errors gives it."""

from __future__ import annotations

import logging
import math
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omnistage.errors import InvalidRequest, OmnistageError

logger = logging.getLogger(__name__)

STATUS_CLIENT_GONE = 499  # nginx's code for "client closed request"; nobody is left to read it

_HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed"}


class ClientGone(Exception):
    """The client disconnected before its answer was complete.  Never reaches anybody."""


def error_body(error: OmnistageError) -> dict[str, Any]:
    """{"error": {message, type, param, code}}, as OpenAI sends it with a status or inside a stream."""
    return _body(error.message, _type_of(error), error.param, error.code)


def unexpected_error(error: BaseException) -> OmnistageError:
    """An error for the client that hides the details of a bug; the traceback goes to the log."""
    logger.error("unexpected error while serving a request", exc_info=error)
    return OmnistageError("the server failed unexpectedly; its log has the details")


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(OmnistageError, _on_omnistage_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_unexpected)


def error_response(error: OmnistageError) -> JSONResponse:
    retry_after = getattr(error, "retry_after", None)
    headers = {} if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def _type_of(error: OmnistageError) -> str:
    if isinstance(error, InvalidRequest) or 400 <= error.status < 429:
        return "invalid_request_error"
    return {429: "rate_limit_error", 503: "service_unavailable_error"}.get(error.status, "server_error")


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _on_omnistage_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OmnistageError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods, which the router raises itself."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is no {request.method} {request.url.path}; /openapi.json lists what there is",
        405: f"{request.url.path} does not take {request.method}; /openapi.json lists what it takes",
    }
    body = _body(
        messages.get(error.status_code, str(error.detail)),
        "invalid_request_error",
        None,
        _HTTP_CODES.get(error.status_code, "invalid_request"),
    )
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=STATUS_CLIENT_GONE)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    return error_response(unexpected_error(error))
