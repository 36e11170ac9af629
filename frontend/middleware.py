"""Around every route: counts answers, reads bodies, allows web pages, turns errors into JSON.

Errors have OpenAI's shape, `{"error": {"message", "type", "code"}}`, except on Anthropic's routes. Web pages
may use the server from a browser only if an operator names their origins (Fetch standard, section 3.3).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from tandem.frontend.absent_routes import instead_of
from tandem.frontend.answers import Error, ErrorDetail
from tandem.frontend.anthropic_errors import (
    ANTHROPIC_ROUTES,
    MAX_MESSAGE_CHARS,
    anthropic_error,
)
from tandem.frontend.edge import EDGE
from tandem.telemetry.log import get_logger
from tandem.wire.errors import BodyTooLarge, ErrorInfo, InvalidRequest, NoNodeAvailable, TandemError

log = get_logger(__name__)

# OpenAI's names. Others are `invalid_request_error` or `server_error`.
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
# If an error does not say when to retry.
_RETRY_AFTER_S = 1
# As nginx: the client closed the request. Only the metrics see it.
_CLIENT_GONE = 499
_SLOW_BODY = 408

OnPrepare = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


class BodyTimedOut(InvalidRequest, code="body_timeout", status=408):
    """The body did not come in time."""


class EncodingUnsupported(InvalidRequest, code="unsupported_encoding", status=415):
    """The body is compressed."""


def error_body(error: ErrorInfo) -> Error:
    """Return an error as clients see it."""
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _ERROR_TYPES.get(error.status, fallback)
    message = error.message[:MAX_MESSAGE_CHARS]
    return Error(ErrorDetail(message=message, type=kind, param=None, code=error.code))


def public_info(error: TandemError) -> ErrorInfo:
    """Return an error without what must not leave the cluster."""
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
    """Return an error as a whole answer, in the shape of the route's API."""
    headers = dict(headers or {})
    if error.is_retryable and error.status in {429, 503}:
        headers["Retry-After"] = str(error.retry_after_s or _RETRY_AFTER_S)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    make_body = anthropic_error if request.path in ANTHROPIC_ROUTES else error_body
    response = json_response(make_body(error), error.status, headers)
    if error.status == _SLOW_BODY:
        response.force_close()  # the rest of the body may come, where a next request is expected
    return response


@web.middleware
async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the answer by route and status. Unknown paths share one label."""
    status = _CLIENT_GONE  # if the handler is cancelled
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        request.app[EDGE].metrics.requests.labels(route, str(status)).inc()


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error with its status and a JSON body."""
    try:
        return await handler(request)
    except TandemError as error:
        info = public_info(error)
        if isinstance(error, NoNodeAvailable):
            # Routers ask again and again while a node loads its model. /health reports the same.
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
        # The top of a request: it fails, the server goes on.
        log.exception("request.crashed", path=request.path)
        return error_response(request, ErrorInfo(code="internal_error", message="internal error"))


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """Return aiohttp's own error as JSON."""
    code, message, headers = "http_error", error.reason, {}
    match error:
        case web.HTTPRequestEntityTooLarge():
            limit = request.app[EDGE].options.http.max_body_bytes
            return error_response(request, BodyTooLarge(f"the body passes {limit} bytes").info())
        case web.HTTPMethodNotAllowed():
            headers["Allow"] = allowed = ", ".join(sorted(error.allowed_methods))
            code, message = (
                "method_not_allowed",
                f"{request.path} takes {allowed}, not {request.method}",
            )
        case web.HTTPNotFound():
            instead = instead_of(request.path) or "/docs lists the routes"
            code, message = "not_found", f"there is no {request.path}: {instead}"
        case _:
            pass
    return error_response(
        request, ErrorInfo(code=code, message=message, status=error.status), headers
    )


@web.middleware
async def read_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Read the body, so that a handler's own `read` never waits. Reject what passes a limit."""
    if not request.body_exists or request.method not in {"POST", "PUT"}:
        return await handler(request)
    options = request.app[EDGE].options
    limit, timeout_s = options.http.max_body_bytes, options.body_timeout_s
    if (request.content_length or 0) > limit:
        raise BodyTooLarge(f"the body passes {limit} bytes")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise EncodingUnsupported("send the body as it is, without Content-Encoding")
    try:
        if request.content.is_eof():  # most bodies came with the head
            await request.read()
        else:
            async with asyncio.timeout(timeout_s):
                await request.read()
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body cannot be read: {error}") from error
    except TimeoutError:
        raise BodyTimedOut(f"the body did not come within {timeout_s:g} s") from None
    return await handler(request)


def answer_preflight(origins: Sequence[str]) -> Middleware:
    """Return a middleware that answers a browser's preflight before a request of a page."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if request.method != hdrs.METH_OPTIONS or not asks or not _allowed(request, origins):
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, HEAD, POST, PUT",
            hdrs.ACCESS_CONTROL_MAX_AGE: "7200",  # Chromium's upper limit
        }
        # The headers that the page asked for: the server takes all, and cookies are not used.
        if asked := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
        return web.Response(status=204, headers=headers)

    return answer


def tell_origin(origins: Sequence[str]) -> OnPrepare:
    """Return a hook that allows pages of these origins to read each answer."""

    async def tell(request: web.Request, response: web.StreamResponse) -> None:
        if "*" not in origins:
            response.headers[hdrs.VARY] = hdrs.ORIGIN  # caches keep the answers apart
        if allowed := _allowed(request, origins):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed

    return tell


def _allowed(request: web.Request, origins: Sequence[str]) -> str | None:
    """Return the origin to allow; None if no page asks, or not one of `origins`."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return None
    if "*" in origins:
        return "*"
    return origin if origin in origins else None
