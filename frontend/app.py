"""The HTTP application: which route is answered by what. Serving it is `frontend/server.py`."""

from aiohttp import web
from aiohttp.typedefs import Middleware

from frontend import generate, openai, routes
from frontend.backend import Backend
from frontend.edge import EDGE, Edge
from frontend.middleware import answer_errors, check_key, count_requests
from frontend.options import FrontendOptions

__all__ = ["FrontendOptions", "create_app"]


def create_app(backend: Backend, options: FrontendOptions | None = None) -> web.Application:
    """Return the app of one edge worker, or of a node's own HTTP.

    Serve it with `frontend.server`, which sets what makes a disconnect cancel its request.

    Args:
        backend: What generates tokens. It may become ready later than the app.
        options: The defaults, when left out.
    """
    options = options or FrontendOptions()
    middlewares: list[Middleware] = [count_requests, answer_errors]
    if options.api_keys:
        middlewares.append(check_key(options.api_keys))
    app = web.Application(client_max_size=options.max_body_bytes, middlewares=middlewares)
    app[EDGE] = Edge(backend, options)
    app.add_routes(_table())
    if options.tokenizer_files is not None:
        app.router.add_get("/tokenizer", routes.tokenizer)
    return app


def _table() -> list[web.RouteDef]:
    return [
        web.post("/generate", generate.generate),
        web.put("/generate", generate.generate),
        web.post("/v1/completions", openai.completions),
        web.post("/v1/chat/completions", openai.chat_completions),
        web.get("/v1/models", routes.models),
        web.get("/v1/models/{name:.+}", routes.one_model),
        web.get("/health", routes.health),
        web.get("/health_generate", routes.health_generate),
        web.get("/model_info", routes.model_info),
        web.get("/get_model_info", routes.model_info),
        web.get("/server_info", routes.server_info),
        web.get("/get_server_info", routes.server_info),
        web.get("/metrics", routes.metrics),
        web.post("/flush_cache", routes.flush_cache),
        web.post("/abort_request", routes.abort_request),
    ]
