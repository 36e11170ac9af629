"""The middleware of every route: metrics, traces, checks, reading the body, errors as JSON, response headers.

Errors have OpenAI's format, `{"error": {"message", "type", "code"}}`, except on Anthropic's routes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from tandem.frontend.chat.generation import PromptTooLong
from tandem.frontend.http.absent_routes import replacement_for
from tandem.frontend.http.api_errors import error_answer, words_of
from tandem.frontend.http.edge import EDGE, Edge
from tandem.frontend.http.keys import client_of, key_of
from tandem.frontend.http.origins import allow_origin, answer_preflight
from tandem.frontend.http.tracing import Tracing
from tandem.frontend.options import FrontendOptions
from tandem.frontend.request_ids import HEADER, response_id
from tandem.telemetry.log import get_access_logger, get_logger
from tandem.wire.errors import BodyTooLarge, ErrorInfo, InvalidRequest, NoNodeAvailable, TandemError

log = get_logger(__name__)
access_log = get_access_logger(__name__)

# For errors without a retry time.
_RETRY_AFTER_S = 1
# NGINX's status for a client that closed the request. Only metrics report it.
_CLIENT_GONE = 499
_SLOW_BODY = 408


class BodyTimedOut(InvalidRequest, code="body_timeout", status=408):
    """The body did not arrive in time."""


class EncodingUnsupported(InvalidRequest, code="unsupported_encoding", status=415):
    """The body is compressed."""


def public_info(error: TandemError) -> ErrorInfo:
    """Return the error as clients may see it. A non-public message is replaced by a generic one."""
    info = error.info()
    if error.is_public:
        return info
    return msgspec.structs.replace(info, message="internal error; see the server's log")


def json_response(
    data: object, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """Return `data` as JSON."""
    return web.Response(
        body=msgspec.json.encode(data),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def error_response(
    request: web.Request, error: ErrorInfo, headers: dict[str, str] | None = None
) -> web.Response:
    """Return an error response in the format of the route's API."""
    headers = dict(headers or {})
    status, body = error_answer(request.path, error)
    if error.is_retryable and status in {429, 503, 529}:
        headers["Retry-After"] = str(error.retry_after_s or _RETRY_AFTER_S)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = json_response(body, status, headers)
    if status == _SLOW_BODY:
        response.force_close()  # the rest of the body would be parsed as the next request
    return response


def serve_requests(
    edge: Edge, checks: Sequence[Callable[[web.Request], None]], tracing: Tracing | None
) -> Middleware:
    """Return the middleware of every route. It counts, traces and logs each request, even if it rejects the request.

    One middleware has all steps, because each middleware costs a request 1 µs.

    Args:
        checks: Called in order before the body is read. They raise if the request must not be served.
    """
    options, requests = edge.options, edge.metrics.requests

    @web.middleware
    async def serve(request: web.Request, handler: Handler) -> web.StreamResponse:
        received_s, trace = time.perf_counter(), None
        status = _CLIENT_GONE  # remains if the task is cancelled
        try:
            response: web.StreamResponse | None = answer_preflight(request, options.http)
            if response is None:
                trace = tracing.start(request) if tracing is not None else None
                try:
                    for check in checks:
                        check(request)
                    await _read_body(request, options)
                    response = await handler(request)
                except Exception as error:  # noqa: BLE001 - `_answer_error` logs unexpected errors
                    response = _answer_error(request, error)
            status = response.status
            return response
        finally:
            if trace is not None:
                trace.end(status)
            # Unknown paths share one label.
            resource = request.match_info.route.resource
            requests("unknown" if resource is None else resource.canonical, status).inc()
            if options.http.access_log:
                access_log.info(
                    "http.request",
                    request_id=response_id(request),
                    key=client_of(request) if key_of(request) else "",
                    remote=request.remote,
                    method=request.method,
                    path=request.path,
                    status=status,
                    duration_s=round(time.perf_counter() - received_s, 6),
                )

    return serve


def _answer_error(request: web.Request, error: Exception) -> web.Response:
    """Convert an error to a response with its status and a JSON body."""
    match error:
        case TandemError():
            info = public_info(error)
            if isinstance(error, PromptTooLong):
                info = msgspec.structs.replace(info, message=words_of(request.path, error))
            if isinstance(error, NoNodeAvailable):
                # Routers poll a node while it loads its model, and /health reports the same.
                log.debug("request.refused", path=request.path, error=error.message)
            elif not error.is_public or error.status >= 500:
                log.warning(
                    "request.failed", path=request.path, code=error.code, error=error.message
                )
            return error_response(request, info)
        case web.HTTPException():
            return _http_error(request, error)
        case ConnectionError():
            log.debug("client.gone", path=request.path)
            return web.Response(status=_CLIENT_GONE)
        case _:
            # An unexpected error fails its request; the server continues.
            log.error("request.crashed", path=request.path, exc_info=error)
            return error_response(
                request, ErrorInfo(code="internal_error", message="internal error")
            )


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """Convert aiohttp's error to JSON."""
    code, message, headers = "http_error", error.reason, {}
    match error:
        case web.HTTPRequestEntityTooLarge():
            limit = request.app[EDGE].options.http.max_body_bytes
            return error_response(request, BodyTooLarge(f"the body exceeds {limit} bytes").info())
        case web.HTTPMethodNotAllowed():
            headers["Allow"] = allowed = ", ".join(sorted(error.allowed_methods))
            code, message = (
                "method_not_allowed",
                f"{request.path} does not support {request.method}; use {allowed}",
            )
        case web.HTTPNotFound():
            remedy = replacement_for(request.path) or "/docs lists the routes"
            code, message = "not_found", f"there is no route {request.path}: {remedy}"
        case _:
            pass
    return error_response(
        request, ErrorInfo(code=code, message=message, status=error.status), headers
    )


async def _read_body(request: web.Request, options: FrontendOptions) -> None:
    """Read the body, so that `read` in a handler never waits. Reject bodies that exceed a limit."""
    if not request.body_exists or request.method not in {"POST", "PUT"}:
        return
    limit, timeout_s = options.http.max_body_bytes, options.body_timeout_s
    if (request.content_length or 0) > limit:
        raise BodyTooLarge(f"the body exceeds {limit} bytes")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise EncodingUnsupported(
            "compressed bodies are not supported; send it without Content-Encoding"
        )
    try:
        if request.content.is_eof():  # most bodies arrive together with the head
            await request.read()
        else:
            async with asyncio.timeout(timeout_s):
                await request.read()
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body cannot be read: {error}") from error
    except TimeoutError:
        raise BodyTimedOut(f"the body did not arrive within {timeout_s:g} s") from None


def prepare_answers(edge: Edge) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Return the hook that completes the headers of each answer, just before they are sent."""
    http = edge.options.http

    async def prepare(request: web.Request, response: web.StreamResponse) -> None:
        response.headers[HEADER] = response_id(request)
        if edge.is_shutting_down:
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()
        if http.cors_origins:
            allow_origin(request, response, http)

    return prepare
