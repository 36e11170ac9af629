"""The HTTP process of a node: listens, serves while a `Supervisor` runs the engine under it, ends with that.

```
 listen ─▶ HTTP answers (health: 503) ─▶ engine loads ─▶ serving ─▶ signal: 503, drain ─▶ engine stops
                                              └─ engine fails to start, or dies ─▶ the node ends with 1
```

What lies between is in `life.py`.
"""

from collections.abc import Mapping
from pathlib import Path

from tandem.frontend.app import create_app
from tandem.frontend.options import FrontendOptions
from tandem.frontend.reply_parser import reply_formats
from tandem.frontend.server import listen, serving
from tandem.frontend.tokenizer import Tokenizer
from tandem.frontend.tokenizer_files import tokenizer_files, tokenizer_hash
from tandem.node.config import NodeConfig, NodeRole
from tandem.node.operations import add_routes
from tandem.node.supervisor import Supervisor
from tandem.telemetry.log import get_logger
from tandem.wire.errors import TandemError
from tandem.wire.keys import ChannelKey

log = get_logger(__name__)


async def serve(
    config: NodeConfig,
    engine_modules: Mapping[NodeRole, str],
    key: ChannelKey | None,
    operator_key: str = "",
) -> int:
    """Run a node until a signal or until its engine ends.

    Args:
        engine_modules: Of each role that the node may have.
        operator_key: Of who may drain the node and turn it; see `frontend/operators.py`.

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
