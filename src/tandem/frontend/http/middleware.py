"""Middlewares of every route: count answers, read bodies, convert errors to JSON.

Errors have OpenAI's format, `{"error": {"message", "type", "code"}}`, except on Anthropic's routes.
"""

import asyncio
import time

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from tandem.frontend.chat.generation import PromptTooLong
from tandem.frontend.http.absent_routes import replacement_for
from tandem.frontend.http.api_errors import error_answer, words_of
from tandem.frontend.http.edge import EDGE
from tandem.frontend.http.keys import client_of, key_of
from tandem.frontend.request_ids import response_id
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


@web.middleware
async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the answer by route and status, and write the access log. Unknown paths share one label."""
    status, received_s = (
        _CLIENT_GONE,
        time.perf_counter(),
    )  # 499 remains if the handler is cancelled
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        edge = request.app[EDGE]
        edge.metrics.requests.labels(route, str(status)).inc()
        if edge.options.http.access_log:
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


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert every error to a response with its status and a JSON body."""
    try:
        return await handler(request)
    except TandemError as error:
        info = public_info(error)
        if isinstance(error, PromptTooLong):
            info = msgspec.structs.replace(info, message=words_of(request.path, error))
        if isinstance(error, NoNodeAvailable):
            # Routers poll a node while it loads its model, and /health reports the same.
            log.debug("request.refused", path=request.path, error=error.message)
        elif not error.is_public or error.status >= 500:
            log.warning("request.failed", path=request.path, code=error.code, error=error.message)
        return error_response(request, info)
    except web.HTTPException as error:
        return _http_error(request, error)
    except ConnectionError:
        log.debug("client.gone", path=request.path)
        return web.Response(status=_CLIENT_GONE)
    except Exception:
        # The last handler of a request: the request fails and the server continues.
        log.exception("request.crashed", path=request.path)
        return error_response(request, ErrorInfo(code="internal_error", message="internal error"))


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


@web.middleware
async def read_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Read the body, so that `read` in a handler never waits. Reject bodies that exceed a limit."""
    if not request.body_exists or request.method not in {"POST", "PUT"}:
        return await handler(request)
    options = request.app[EDGE].options
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
    return await handler(request)
