"""The HTTP process of a node: its server, its life cycle, and its engines, one after another.

The supervisor starts the engine of the node's role, attaches it to the backend, forwards orders and stops the
engine, as `life.py` allows. Orders arrive as signals and on the operators' routes `/drain`, `/role` and
`/update_weights_from_disk`. To change its role or weights, a node stops its engine and starts a new one.

```
 listen ─▶ HTTP answers (health: 503) ─▶ engine loads ─▶ serving ─▶ signal: 503, drain ─▶ engine stops
                                              └─ engine fails to start, or dies ─▶ the node ends with status 2 or 1
```
"""

import asyncio
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from tandem.frontend.app import create_app
from tandem.frontend.chat.body import Body, read_json, validate
from tandem.frontend.http.keys import operators_only
from tandem.frontend.http.middleware import json_response
from tandem.frontend.http.server import listen, serving
from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.parser import reply_formats
from tandem.frontend.text.tokenizer import Tokenizer, tokenizer_hash, with_chat_template
from tandem.frontend.text.tokenizer_files import tokenizer_files
from tandem.node.config import MAX_DRAIN_S, NodeConfig, NodeRole
from tandem.node.life.engine_process import EngineProcess, Joined, Ready, keep_linked
from tandem.node.life.life import LifeEvent, NodeState, StateConflict, refusal
from tandem.node.local_backend import LocalBackend
from tandem.node.models.new_weights import (
    Update,
    UpdateBody,
    config_with_weights,
    update_answer,
)
from tandem.node.process.announce import LEAVE_TIMEOUT_S, Announcer, warn_of_loopback
from tandem.telemetry.log import configure, get_logger
from tandem.wire.channel import tcp_address
from tandem.wire.engine_client import EngineClient
from tandem.wire.errors import TandemError
from tandem.wire.generation import Epoch
from tandem.wire.keys import ChannelKey

log = get_logger(__name__)

# Maximum time that an ending node waits after the drain's deadline, at which it hands over its requests. By then no
# peer can write pages any more: a peer that died, stopped or is unreachable counts as lost after 2 s.
HAND_OVER_S = 5.0
# vLLM's routers send no key here.
QUERY_ROUTE = "/query"


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a node. `remaining_s`: seconds until the remaining requests are handed over; None unless draining."""

    role: str
    state: str
    detail: str
    num_left: int
    remaining_s: float | None = None


class Supervisor:
    """Runs a node.

    Args:
        engine_modules: Engine module of each role that the node can take.
        backend: Backend of the node's HTTP server; its `life` is the node's.
        announcer: Announces the node to routers.
        port: The node's HTTP port.
    """

    def __init__(
        self,
        config: NodeConfig,
        engine_modules: Mapping[NodeRole, str],
        key: ChannelKey | None,
        backend: LocalBackend,
        announcer: Announcer,
        *,
        port: int,
    ) -> None:
        self._config, self._modules, self._key = config, engine_modules, key
        self._life, self._backend, self._announcer = backend.life, backend, announcer
        shown = f"[{config.host}]" if ":" in config.host else config.host
        self._url = f"{config.http.scheme}://{shown}:{port}"
        self._engine = self._new_engine(config)
        self._changed = asyncio.Event()
        self._deadline_s = 0.0
        self._update: Update | None = None
        self._is_ending = False
        self._status = 0
        loop = asyncio.get_running_loop()
        # A user who presses Ctrl-C waits for the exit, so requests move to other nodes immediately.
        loop.add_signal_handler(signal.SIGINT, self._on_signal, 0.0)
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, config.drain_timeout_s)

    # ── orders ───────────────────────────────────────────────────────────────────────────────────

    def status(self) -> NodeStatus:
        """Return the node's status."""
        num_left, remaining_s = self._backend.num_left, None
        if self._life.state in (NodeState.DRAINING, NodeState.LEAVING):
            remaining_s = max(0.0, self._deadline_s - asyncio.get_running_loop().time())
        return NodeStatus(
            role=self._life.role,
            state=self._life.state,
            detail=self._life.describe(num_left),
            num_left=num_left,
            remaining_s=remaining_s,
        )

    def drain(self, timeout_s: float | None) -> None:
        """Reject new requests; hand over those unfinished after `timeout_s` (None: `--drain-timeout-s`)."""
        if self._apply(LifeEvent.DRAIN) is NodeState.DRAINING:
            self._drain_engine(self._config.drain_timeout_s if timeout_s is None else timeout_s)

    def resume(self) -> None:
        """Accept requests again."""
        if self._apply(LifeEvent.RESUME) is NodeState.SERVING:
            self._engine.resume()
            self._end_update(
                StateConflict("the drain was cancelled; the node keeps the old weights")
            )

    def turn(self, role: NodeRole) -> None:
        """Start to change the node's role."""
        if self._life.turn(role, self._backend.num_left):
            log.info("node.turning", role=role)
            self._changed.set()

    async def update(self, body: UpdateBody) -> NodeConfig:
        """Drain the node and load a new checkpoint; return the new config once it serves.

        Raises:
            InvalidRequest: The checkpoint cannot be served; the node keeps the old one.
            StateConflict: The node's state does not allow an update, or the drain was cancelled.
            EngineFailed: The new engine failed; the node serves the old weights again.
            NodeDraining: The node is ending.
        """
        new = await asyncio.to_thread(config_with_weights, self._config, body)
        if self._update is not None:
            raise StateConflict(
                "an update of the weights is in progress; wait until it has finished"
            )
        timeout_s = 0.0 if body.abort_all_requests else body.timeout_s
        state = self._apply(LifeEvent.DRAIN)
        self._update = update = Update(self._config, new)
        if state is NodeState.DRAINED:
            self._load_new_weights()
        else:
            self._drain_engine(self._config.drain_timeout_s if timeout_s is None else timeout_s)
        # The update continues if the client disconnects.
        await asyncio.shield(update.outcome)
        return new

    def _load_new_weights(self) -> None:
        """Replace the drained engine by one that loads the new weights."""
        assert self._update is not None
        self._config = self._update.new
        log.info("node.updating", path=self._config.engine.model_dir)
        self._apply(LifeEvent.LOAD)

    def _fall_back(self, error: TandemError) -> bool:
        """Make the next engine load the old weights. Return False without an update, or if they were tried already."""
        if self._update is None or self._update.error is not None:
            return False
        log.error("node.not_updated", reason=error.message, action="loading the old weights")
        self._config, self._update.error = self._update.old, error
        return True

    def _end_update(self, error: TandemError | None = None) -> None:
        """Finish the update in progress, if there is one; `error`: why it failed."""
        update, self._update = self._update, None
        if update is not None:
            update.end(error)

    def _on_signal(self, timeout_s: float) -> None:
        if self._is_ending:  # a second signal forces the exit
            self._status = 1
            self._engine.kill()
            self._apply(LifeEvent.FORCE)
        else:
            # The first host may be signalled later, and its drain needs the ranks here.
            more_s = HAND_OVER_S if self._life.state is NodeState.JOINED else 0.0
            if self._apply(LifeEvent.END) is NodeState.LEAVING:
                self._drain_engine(timeout_s)
                after_s = timeout_s + HAND_OVER_S + more_s
                asyncio.get_running_loop().call_later(after_s, self._on_too_late)
        self._is_ending = True

    def _on_too_late(self) -> None:
        if self._life.state is NodeState.LEAVING:
            log.warning(
                "node.not_emptied",
                num_left=self._backend.num_left,
                effect="the node exits",
                see="docs/operations.md#ending",
            )
            self._apply(LifeEvent.TOO_LATE)

    def _on_drained(self) -> None:
        if self._life.is_draining:
            log.info("node.drained")
            if self._apply(LifeEvent.EMPTIED) is NodeState.DRAINED and self._update is not None:
                self._load_new_weights()

    def _drain_engine(self, timeout_s: float) -> None:
        log.info("node.draining", num_left=self._backend.num_left, timeout_s=timeout_s)
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s
        self._engine.drain(timeout_s)

    def _apply(self, event: LifeEvent) -> NodeState:
        state = self._life.apply(event)
        self._changed.set()
        return state

    # ── engines ──────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> int | TandemError:
        """Run until a signal ends the node or its engine dies.

        Return the exit status, or the error if the first engine could not start.
        """
        warn_of_loopback(self._config)
        async with asyncio.TaskGroup() as tasks:
            announcing = tasks.create_task(self._announcer.run())
            outcome: int | TandemError | None = None
            while outcome is None:
                outcome = await self._run_engine(announcing)
            announcing.cancel()
        self._end_update(refusal())
        return outcome

    async def _run_engine(self, announcing: asyncio.Task[None]) -> int | TandemError | None:
        """Run one engine from start to stop; return None if the node continues with a new engine."""
        config = msgspec.structs.replace(self._config, role=self._life.role)
        configure(config.log_level, config.log_format, role=config.role)
        self._engine = engine = self._new_engine(config)
        try:
            ready = await self._start_unless_ended(engine)
            if isinstance(ready, Ready):
                if await self._serve(config, ready, announcing):
                    return 1
            elif isinstance(ready, Joined):
                return await self._run_ranks()
            else:
                engine.kill()  # it has no requests, and may still be loading a model
            if isinstance(ready, TandemError):
                if self._life.state is NodeState.LOADING:
                    return None if self._fall_back(ready) else ready
                await self._wait_for_role_change(config.role, ready)
        finally:
            self._backend.detach()
            await engine.stop()
        return self._status if self._life.state is NodeState.ENDED else None

    def _new_engine(self, config: NodeConfig) -> EngineProcess:
        return EngineProcess(self._modules[config.role], config, self._on_drained)

    async def _start_unless_ended(
        self, engine: EngineProcess
    ) -> Ready | Joined | TandemError | None:
        """Start an engine; return None if the node ends before the engine is ready."""
        async with asyncio.TaskGroup() as tasks:
            starting = tasks.create_task(engine.start())
            ended = tasks.create_task(self._changes_while(NodeState.LOADING, NodeState.TURNING))
            await asyncio.wait([starting, ended], return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            starting.cancel()
        return None if starting.cancelled() else starting.result()

    async def _serve(
        self, config: NodeConfig, ready: Ready, announcing: asyncio.Task[None]
    ) -> bool:
        """Serve until the engine has to stop; return True if it died."""
        address = tcp_address(_reachable(config.host), ready.engine_port)
        make_client = partial(
            EngineClient,
            address,
            self._key,
            Epoch(ready.epoch),
            config.heartbeat,
            on_change=self._changed.set,
            wants_measures=True,
        )
        self._backend.attach(config, ready)
        async with asyncio.TaskGroup() as tasks:
            linked = tasks.create_task(keep_linked(make_client, self._backend.link))
            died = tasks.create_task(self._engine.wait())
            died.add_done_callback(lambda _task: self._changed.set())
            # Until the link is up, the node reports that it loads.
            while self._life.is_loading and not (died.done() or self._backend.is_linked):
                await self._changed.wait()
                self._changed.clear()
            if self._life.is_loading:
                self._apply(LifeEvent.LOADED)
                log.info("node.serving", url=self._url)
                self._end_update()
            while self._life.has_engine and not died.done():
                await self._changed.wait()
                self._changed.clear()
            has_died = self._life.has_engine
            if has_died:
                log.error("engine.died", status=died.result(), effect="the node exits")
            elif self._life.state is NodeState.ENDED and not self._status:
                # Withdraw while the engine still answers; otherwise routers would count the node as lost.
                self._announcer.stop()
                await asyncio.wait([announcing], timeout=LEAVE_TIMEOUT_S)
            self._backend.detach()
            linked.cancel()
            died.cancel()
        return has_died

    async def _run_ranks(self) -> int:
        """Run ranks of a node that serves on a different host, until they end with it; return the exit status."""
        self._apply(LifeEvent.JOINED)
        log.info("node.joined", detail=self._life.describe())
        async with asyncio.TaskGroup() as tasks:
            died = tasks.create_task(self._engine.wait())
            died.add_done_callback(lambda _task: self._changed.set())
            while self._life.has_engine and not died.done():
                await self._changed.wait()
                self._changed.clear()
            died.cancel()
        if self._life.state is NodeState.JOINED:
            log.error("ranks.ended", reason="the node's first host, or a rank, has ended")
            return 1
        return self._status

    async def _wait_for_role_change(self, role: NodeRole, error: TandemError) -> None:
        """Report the failure, and wait until the node changes its role again or ends."""
        log.error("node.not_turned", role=role, reason=error.message)
        self._life.not_loaded(error.message)
        await self._changes_while(NodeState.FAILED)

    async def _changes_while(self, *states: NodeState) -> None:
        """Wait until the node is in none of these states."""
        while self._life.state in states:
            await self._changed.wait()
            self._changed.clear()


def _reachable(host: str) -> str:
    """Return the local address of a socket that is bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────


class DrainBody(Body):
    """`POST /drain`."""

    timeout_s: Annotated[float, Meta(ge=0, le=MAX_DRAIN_S)] | None = None
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
    """Run a node.

    Return 0 after a signal, or 1 if the engine died or a second signal forced the exit. Raise the error of an
    engine that could not start. The operators' routes require `operator_key`.
    """
    engine = config.engine
    files = tokenizer_files(
        Path(engine.model_dir),
        trusts_code=engine.trust_remote_code,
        cache=Path(config.cache_dir) / "tokenizers" if config.cache_dir else None,
    )
    files = with_chat_template(files, config.chat_template)
    tokenizer = Tokenizer.from_files(files) if files else None
    _warn_of_missing_text(tokenizer)
    with listen(config.host, config.port) as sock:
        port = sock.getsockname()[1]
        backend = LocalBackend(config, tokenizer, tokenizer_hash(files))
        announcer = Announcer(config, port, lambda: backend.life.role, operator_key)
        node = Supervisor(config, engine_modules, key, backend, announcer, port=port)
        app = create_app(backend, _options(config, tokenizer, files, operator_key))
        add_routes(app, node, backend)
        async with serving(app, sock):
            outcome = await node.run()
    if isinstance(outcome, TandemError):
        raise outcome
    return outcome


def _warn_of_missing_text(tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        log.warning(
            "tokenizer.missing",
            effect="requests must use input_ids, and answers have no text",
            action="set --model of the nodes, or --tokenizer of the router, to a directory with tokenizer.json, which "
            "save_pretrained of transformers' tokenizers writes",
        )
    elif not tokenizer.has_chat_template:
        log.warning(
            "chat_template.missing",
            effect="chats are rejected with 400",
            action="set --chat-template FILE on this node and its peers, or on the router",
        )


def _options(
    config: NodeConfig, tokenizer: Tokenizer | None, files: Mapping[str, str], operator_key: str
) -> FrontendOptions:
    formats = reply_formats(config.tool_call_parser, config.reasoning_parser)
    if tokenizer is not None:
        formats = formats.for_model(tokenizer.response_template)
    return FrontendOptions(
        http=config.http,
        incremental_streaming_output=config.is_incremental_output,
        tokenizer_files=lambda: files,
        reply_formats=formats,
        operator_key=operator_key,
        open_paths=frozenset({QUERY_ROUTE}),
        service=f"tandem-{config.role}",
    )


def add_routes(app: web.Application, node: Supervisor, backend: LocalBackend) -> None:
    """Add the operators' routes to a node's app, and the route by which vLLM's routers find prefill's bootstrap port."""

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

    async def update_weights(request: web.Request) -> web.Response:
        config = await node.update(validate(UpdateBody, read_json(await request.read())))
        return json_response(update_answer(config))

    async def query(_request: web.Request) -> web.Response:
        return json_response(backend.query())

    app.router.add_get(QUERY_ROUTE, query)
    app.router.add_get("/drain", operators_only(status))
    app.router.add_post("/drain", operators_only(drain))
    app.router.add_post("/role", operators_only(turn))
    app.router.add_post("/update_weights_from_disk", operators_only(update_weights))
