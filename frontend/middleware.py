"""Around every route: counts the answer, checks the key, turns errors into JSON of one shape.

The shape is OpenAI's, on the native routes as well: `{"error": {"message", "type", "code"}}`.
"""

import hmac
from collections.abc import Iterable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from frontend.edge import EDGE
from telemetry.log import get_logger
from wire.errors import BodyTooLarge, ErrorInfo, NoNodeAvailable, TandemError, Unauthorized

log = get_logger(__name__)

# A balancer probes the first and a scraper reads the second, often without a key.
OPEN_ROUTES = frozenset({"/health", "/metrics"})
# OpenAI's names; what is not listed is the server's fault.
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_RETRY_AFTER_S = "1"
# As nginx: the client closed the request. It reaches nobody but the metrics.
_CLIENT_GONE = 499


def error_body(error: ErrorInfo) -> dict[str, object]:
    """Return an error as clients see it."""
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _ERROR_TYPES.get(error.status, fallback)
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


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


def _error_response(error: ErrorInfo, headers: dict[str, str] | None = None) -> web.Response:
    headers = dict(headers or {})
    if error.is_retryable and error.status in {429, 503}:
        headers["Retry-After"] = _RETRY_AFTER_S
    return json_response(error_body(error), error.status, headers)


@web.middleware
async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the answer by route and status. Unknown paths share one label."""
    response = await handler(request)
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown"
    request.app[EDGE].metrics.requests.labels(route, str(response.status)).inc()
    return response


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
        return _error_response(info)
    except web.HTTPException as error:
        return _http_error(request, error)
    except ConnectionError:
        log.debug("client.gone", path=request.path)
        return web.Response(status=_CLIENT_GONE)
    except Exception:
        # The top of a request: it fails, the server goes on.
        log.exception("request.crashed", path=request.path)
        return _error_response(ErrorInfo(code="internal_error", message="internal error"))


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """Say in JSON what aiohttp says in text, and which routes there are."""
    match error:
        case web.HTTPRequestEntityTooLarge():
            limit = request.app[EDGE].options.max_body_bytes
            return _error_response(BodyTooLarge(f"the body passes {limit} bytes").info())
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} takes {allowed}, not {request.method}"
            headers = {"Allow": allowed}
            info = ErrorInfo(code="method_not_allowed", message=message, status=405)
            return _error_response(info, headers)
        case web.HTTPNotFound():
            message = f"there is no {request.path}; there are {', '.join(_routes(request.app))}"
            return _error_response(ErrorInfo(code="not_found", message=message, status=404))
        case _:
            info = ErrorInfo(code="http_error", message=error.reason, status=error.status)
            return _error_response(info)


def _routes(app: web.Application) -> list[str]:
    return sorted(resource.canonical for resource in app.router.resources())


def check_key(api_keys: Iterable[str]) -> Middleware:
    """Return a middleware that lets in who bears one of `api_keys`."""
    accepted = [f"Bearer {key}".encode() for key in api_keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if request.path not in OPEN_ROUTES and not _is_one_of(given, accepted):
            raise Unauthorized("send the API key as 'Authorization: Bearer KEY'")
        return await handler(request)

    return check


def _is_one_of(given: bytes, accepted: list[bytes]) -> bool:
    # Each comparison takes the same time wherever the bytes differ, so a key cannot be probed.
    return any(hmac.compare_digest(given, key) for key in accepted)
