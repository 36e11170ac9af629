"""Around every route: counts the answer, checks the key, turns errors into JSON of one shape.

The shape is OpenAI's, on the native routes as well: `{"error": {"message", "type", "code"}}`.
"""

import hashlib
import hmac
from collections.abc import Iterable, Set

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tandem.frontend.edge import EDGE
from tandem.telemetry.log import get_logger
from tandem.wire.errors import BodyTooLarge, ErrorInfo, NoNodeAvailable, TandemError, Unauthorized

log = get_logger(__name__)

# A balancer probes the first, a supervisor the second and a scraper reads the third, often without a
# key. The last two tell what every copy of this server tells, to browsers that have no key to send.
OPEN_ROUTES = frozenset({"/health", "/live", "/metrics", "/openapi.json", "/docs"})
# What a router asks of a node.
READER_ROUTES = frozenset({"/server_info", "/tokenizer"})
# OpenAI's names; what is not listed is the server's fault.
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
# Where nobody knows when it helps.
_RETRY_AFTER_S = 1
# As nginx: the client closed the request. It reaches nobody but the metrics.
_CLIENT_GONE = 499
_SLOW_BODY = 408
_MAX_MESSAGE_CHARS = 2000


def error_body(error: ErrorInfo) -> dict[str, object]:
    """Return an error as clients see it."""
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _ERROR_TYPES.get(error.status, fallback)
    message = error.message[:_MAX_MESSAGE_CHARS]  # it may quote what a client sent
    return {"error": {"message": message, "type": kind, "param": None, "code": error.code}}


def public_info(error: TandemError) -> ErrorInfo:
    """Return what may be told of an error outside the building."""
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


def error_response(error: ErrorInfo, headers: dict[str, str] | None = None) -> web.Response:
    """Return an error as the whole of an answer."""
    headers = dict(headers or {})
    if error.is_retryable and error.status in {429, 503}:
        headers["Retry-After"] = str(error.retry_after_s or _RETRY_AFTER_S)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = json_response(error_body(error), error.status, headers)
    if error.status == _SLOW_BODY:
        response.force_close()  # more of the body may come, in place of a next request
    return response


@web.middleware
async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the answer by route and status. Unknown paths share one label."""
    status = _CLIENT_GONE  # unless there is an answer: nothing else cancels a handler
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
            # Routers ask a node that loads its model again and again; /health says the same.
            log.debug("request.refused", path=request.path, error=error.message)
        elif not error.is_public or error.status >= 500:
            log.warning("request.failed", path=request.path, code=error.code, error=error.message)
        return error_response(info)
    except web.HTTPException as error:
        return _http_error(request, error)
    except ConnectionError:
        log.debug("client.gone", path=request.path)
        return web.Response(status=_CLIENT_GONE)
    except Exception:
        # The top of a request: it fails, the server goes on.
        log.exception("request.crashed", path=request.path)
        return error_response(ErrorInfo(code="internal_error", message="internal error"))


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """Say in JSON what aiohttp says in text, and which routes there are."""
    match error:
        case web.HTTPRequestEntityTooLarge():
            limit = request.app[EDGE].options.http.max_body_bytes
            return error_response(BodyTooLarge(f"the body passes {limit} bytes").info())
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} takes {allowed}, not {request.method}"
            headers = {"Allow": allowed}
            info = ErrorInfo(code="method_not_allowed", message=message, status=405)
            return error_response(info, headers)
        case web.HTTPNotFound():
            message = f"there is no {request.path}; there are {', '.join(_routes(request.app))}"
            return error_response(ErrorInfo(code="not_found", message=message, status=404))
        case _:
            info = ErrorInfo(code="http_error", message=error.reason, status=error.status)
            return error_response(info)


def _routes(app: web.Application) -> list[str]:
    return sorted(resource.canonical for resource in app.router.resources())


def check_key(
    api_keys: Iterable[str], open_paths: Set[str] = frozenset(), reader_key: str = ""
) -> Middleware:
    """Return a middleware that lets in who bears one of `api_keys`, and everybody to `open_paths`.

    Args:
        reader_key: Opens `READER_ROUTES`; empty: nothing.
    """
    accepted = [_digest(key.encode()) for key in api_keys]
    readers = [*accepted, _digest(reader_key.encode())] if reader_key else accepted

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.path in OPEN_ROUTES or request.path in open_paths
        keys = readers if request.path in READER_ROUTES else accepted
        if not is_open and not _is_one_of(key_of(request), keys):
            raise Unauthorized("send the API key as 'Authorization: Bearer KEY'")
        return await handler(request)

    return check


def bears(request: web.Request, key: str) -> bool:
    """Tell whether a request bears this key."""
    return _is_one_of(key_of(request), [_digest(key.encode())])


def key_of(request: web.Request) -> bytes:
    """Return the bearer token of a request; empty where it has none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_one_of(given: bytes, accepted: list[bytes]) -> bool:
    # Digests are of one length, and every one is compared to its end: the time tells nothing of
    # where the bytes differ, how long a key is, or which of them came near.
    digest = _digest(given)
    return sum(hmac.compare_digest(digest, known) for known in accepted) > 0
