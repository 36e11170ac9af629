"""The HTTP process of a node: listens, serves while a `Supervisor` runs the engine under it, ends with that.

Beside what the frontend serves it has routes for operators: `/drain` and `/role`.

```
 listen ─▶ HTTP answers (health: 503) ─▶ engine loads ─▶ serving ─▶ signal: 503, drain ─▶ engine stops
                                              └─ engine fails to start, or dies ─▶ the node ends with 1
```

What lies between is in `life.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from aiohttp import web
from pydantic import Field

from tandem.frontend.app import create_app
from tandem.frontend.body import Body, read_json, validate
from tandem.frontend.caller import expect
from tandem.frontend.keys import operators_only
from tandem.frontend.middleware import json_response
from tandem.frontend.options import FrontendOptions
from tandem.frontend.reply_parser import reply_formats
from tandem.frontend.server import listen, serving
from tandem.frontend.tokenizer import Tokenizer
from tandem.frontend.tokenizer_files import tokenizer_files, tokenizer_hash
from tandem.node.config import MAX_DRAIN_S, NodeConfig, NodeRole
from tandem.node.supervisor import Supervisor
from tandem.telemetry.log import get_logger
from tandem.wire.errors import TandemError
from tandem.wire.keys import ChannelKey

log = get_logger(__name__)


class DrainBody(Body):
    """`POST /drain`."""

    timeout_s: Annotated[float, Field(ge=0, le=MAX_DRAIN_S)] | None = None
    cancel: bool = False


class RoleBody(Body):
    """`POST /role`."""

    role: Literal["prefill", "decode"]


async def serve(
    config: NodeConfig,
    engine_modules: Mapping[NodeRole, str],
    key: ChannelKey | None,
    operator_key: str = "",
) -> int:
    """Run a node until a signal or until its engine ends.

    Args:
        engine_modules: Of each role that the node may have.
        operator_key: Of those who may drain the node and turn it; see `frontend/keys.py`.

    Returns:
        0 after a signal, 1 when the engine ended by itself or a second signal forced the end.

    Raises:
        TandemError: The tokenizer is broken, the port is in use, or the engine could not start.
    """
    files = tokenizer_files(Path(config.engine.model_dir))
    if not files:
        log.warning(
            "tokenizer.missing", effect="only input_ids can be served, and no text comes out"
        )
    tokenizer = Tokenizer.from_files(files) if files else None
    with listen(config.host, config.port) as sock:
        port = sock.getsockname()[1]
        node = Supervisor(
            config,
            engine_modules,
            key,
            tokenizer=tokenizer,
            tokenizer_hash=tokenizer_hash(files),
            port=port,
            operator_key=operator_key,
        )
        app = create_app(node.backend, _options(config, files, operator_key))
        add_routes(app, node)
        async with serving(app, sock):
            outcome = await node.run()
    if isinstance(outcome, TandemError):
        raise outcome
    return outcome


def _options(config: NodeConfig, files: Mapping[str, str], operator_key: str) -> FrontendOptions:
    return FrontendOptions(
        http=config.http,
        incremental_streaming_output=config.is_incremental_output,
        tokenizer_files=lambda: files,
        reply_formats=reply_formats(config.tool_call_parser, config.reasoning_parser),
        operator_key=operator_key,
        service=f"tandem-{config.role}",
    )


def add_routes(app: web.Application, node: Supervisor) -> None:
    """Give a node's app the routes of its operators."""

    async def status(_request: web.Request) -> web.Response:
        return json_response(node.status())

    async def drain(request: web.Request) -> web.Response:
        data = await request.read()
        body = validate(DrainBody, read_json(data) if data.strip() else {})
        if body.cancel:
            node.resume()
        else:
            node.drain(body.timeout_s)
        return json_response(node.status())

    async def turn(request: web.Request) -> web.Response:
        node.turn(validate(RoleBody, read_json(await request.read())).role)
        return json_response(node.status())

    app.router.add_get("/drain", operators_only(status))
    app.router.add_post("/drain", operators_only(drain), expect_handler=expect)
    app.router.add_post("/role", operators_only(turn), expect_handler=expect)
