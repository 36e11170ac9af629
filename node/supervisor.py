"""A node's HTTP process: its server, its life cycle, and its engines, one after another.

The supervisor starts the engine of the node's role, attaches it to the backend, forwards orders and ends the
engine, as `life.py` allows. Orders arrive by signal and by the operators' routes `/drain`, `/role` and
`/update_weights_from_disk`. A node that changes its role or its weights ends its engine and starts another one.

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
from pydantic import Field

from tandem.frontend.app import create_app
from tandem.frontend.body import Body, read_json, validate
from tandem.frontend.engine_client import EngineClient
from tandem.frontend.keys import operators_only
from tandem.frontend.middleware import json_response
from tandem.frontend.options import FrontendOptions
from tandem.frontend.reply_parser import reply_formats
from tandem.frontend.server import listen, serving
from tandem.frontend.tokenizer import (
    Tokenizer,
    tokenizer_files,
    tokenizer_hash,
    with_chat_template,
)
from tandem.node.announce import LEAVE_TIMEOUT_S, Announcer, warn_of_loopback
from tandem.node.config import MAX_DRAIN_S, NodeConfig, NodeRole
from tandem.node.engine_process import EngineProcess, Ready, keep_linked
from tandem.node.life import Event, NotNow, State, refusal
from tandem.node.local_backend import LocalBackend
from tandem.node.new_weights import Update, UpdateBody, update_answer, updated
from tandem.telemetry.log import configure, get_logger
from tandem.wire.channel import tcp_address
from tandem.wire.errors import TandemError
from tandem.wire.generation import Epoch
from tandem.wire.keys import ChannelKey

log = get_logger(__name__)

# Time limit after the drain's deadline, when requests were handed over, until no peer can write a page any more.
# A peer that does not answer counts as lost after 2 s.
HAND_OVER_S = 5.0
# Interval of looking whether a new engine is linked, which takes milliseconds.
LINK_POLL_S = 0.02


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node's status. `remaining_s`: time until remaining requests are handed over; None unless draining."""

    role: str
    state: str
    detail: str
    num_left: int
    remaining_s: float | None = None


class Supervisor:
    """Runs a node.

    Args:
        engine_modules: The engine's module for each role that the node may take.
        backend: The backend of the node's HTTP server; its `life` is the node's.
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
        self._is_told_to_end = False
        self._status = 0
        loop = asyncio.get_running_loop()
        # A person who presses Ctrl-C waits for the end, so the requests move to other nodes at once.
        loop.add_signal_handler(signal.SIGINT, self._told_to_end, 0.0)
        loop.add_signal_handler(signal.SIGTERM, self._told_to_end, config.drain_timeout_s)

    # ── orders ───────────────────────────────────────────────────────────────────────────────────

    def status(self) -> NodeStatus:
        """Return the node's status."""
        num_left, remaining_s = self._backend.num_left, None
        if self._life.state in (State.DRAINING, State.LEAVING):
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
        if self._apply(Event.DRAIN) is State.DRAINING:
            self._drain_engine(self._config.drain_timeout_s if timeout_s is None else timeout_s)

    def resume(self) -> None:
        """Accept requests again."""
        if self._apply(Event.RESUME) is State.SERVING:
            self._engine.resume()
            self._end_update(
                NotNow("the drain was cancelled: the node goes on with the old weights")
            )

    def turn(self, role: NodeRole) -> None:
        """Begin to change the node's role."""
        if self._life.turn(role, self._backend.num_left):
            log.info("node.turning", role=role)
            self._changed.set()

    async def update(self, body: UpdateBody) -> NodeConfig:
        """Drain the node and serve another checkpoint; return the new config once it serves.

        Raises:
            InvalidRequest: The checkpoint cannot be served; the node goes on with the old one.
            NotNow: The node is in another state, or the drain was cancelled.
            EngineFailed: The new engine failed; the node goes on with the old weights.
            NodeDraining: The node ends meanwhile.
        """
        new = await asyncio.to_thread(updated, self._config, body)
        if self._update is not None:
            raise NotNow("an update of the weights is in progress: wait until it is answered")
        timeout_s = 0.0 if body.abort_all_requests else body.timeout_s
        state = self._apply(Event.DRAIN)
        self._update = update = Update(self._config, new)
        if state is State.DRAINED:
            self._load()
        else:
            self._drain_engine(self._config.drain_timeout_s if timeout_s is None else timeout_s)
        # The update outlives a client that does not wait for it.
        try:
            await asyncio.shield(update.outcome)
        finally:
            while self._life.state is State.SERVING and not self._backend.health().is_serving:  # noqa: ASYNC110
                await asyncio.sleep(LINK_POLL_S)
        return new

    def _load(self) -> None:
        """Have the drained engine end, and the next one load the new weights."""
        assert self._update is not None
        self._config = self._update.new
        log.info("node.updating", path=self._config.engine.model_dir)
        self._apply(Event.LOAD)

    def _goes_back(self, error: TandemError) -> bool:
        """Have the next engine load the old weights again; return False if that was already tried."""
        if self._update is None or self._update.error is not None:
            return False
        log.error("node.not_updated", reason=error.message, action="loading the old weights again")
        self._config, self._update.error = self._update.old, error
        return True

    def _end_update(self, error: TandemError | None = None) -> None:
        """Answer the update in progress, if there is one; `error`: why it did not begin or end."""
        update, self._update = self._update, None
        if update is not None:
            update.end(error)

    def _told_to_end(self, timeout_s: float) -> None:
        if self._is_told_to_end:  # a second signal forces
            self._status = 1
            self._engine.kill()
            self._apply(Event.FORCE)
        elif self._apply(Event.END) is State.LEAVING:
            self._drain_engine(timeout_s)
            asyncio.get_running_loop().call_later(timeout_s + HAND_OVER_S, self._too_late)
        self._is_told_to_end = True

    def _too_late(self) -> None:
        if self._life.state is State.LEAVING:
            log.warning(
                "node.not_emptied",
                num_left=self._backend.num_left,
                effect="the node ends",
                see="tandem docs operations#ending",
            )
            self._apply(Event.TOO_LATE)

    def _drained(self) -> None:
        if self._life.is_draining:
            log.info("node.drained")
            if self._apply(Event.EMPTIED) is State.DRAINED and self._update is not None:
                self._load()

    def _drain_engine(self, timeout_s: float) -> None:
        log.info("node.draining", num_left=self._backend.num_left, timeout_s=timeout_s)
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s
        self._engine.drain(timeout_s)

    def _apply(self, event: Event) -> State:
        state = self._life.apply(event)
        self._changed.set()
        return state

    # ── engines ──────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> int | TandemError:
        """Run until a signal ends the node or its engine dies.

        Return the exit status, or the error for which the first engine could not start.
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
        """Run one engine from start to stop; return None if the node continues with another."""
        config = msgspec.structs.replace(self._config, role=self._life.role)
        configure(config.log_level, config.log_format, role=config.role)
        self._engine = engine = self._new_engine(config)
        try:
            ready = await self._unless_ended(engine)
            if isinstance(ready, Ready):
                if await self._serve(config, ready, announcing):
                    return 1
            else:
                engine.kill()  # it may still be loading a model, and has no requests
            if isinstance(ready, TandemError):
                if self._life.state is State.LOADING:
                    return None if self._goes_back(ready) else ready
                await self._wait_to_be_turned(config.role, ready)
        finally:
            self._backend.detach()
            await engine.stop()
        return self._status if self._life.state is State.ENDED else None

    def _new_engine(self, config: NodeConfig) -> EngineProcess:
        return EngineProcess(self._modules[config.role], config, self._drained)

    async def _unless_ended(self, engine: EngineProcess) -> Ready | TandemError | None:
        """Start an engine; return None if the node was ended first."""
        async with asyncio.TaskGroup() as tasks:
            starting = tasks.create_task(engine.start())
            ended = tasks.create_task(self._changes_while(State.LOADING, State.TURNING))
            await asyncio.wait([starting, ended], return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            starting.cancel()
        return None if starting.cancelled() else starting.result()

    async def _serve(
        self, config: NodeConfig, ready: Ready, announcing: asyncio.Task[None]
    ) -> bool:
        """Serve until the engine must end; return True if it died instead."""
        address = tcp_address(_reachable(config.host), ready.engine_port)
        make_client = partial(
            EngineClient,
            address,
            self._key,
            Epoch(ready.epoch),
            config.heartbeat,
            wants_measures=True,
        )
        self._backend.attach(config, ready)
        async with asyncio.TaskGroup() as tasks:
            linked = tasks.create_task(keep_linked(make_client, self._backend.link))
            self._apply(Event.LOADED)
            log.info("node.serving", url=self._url)
            self._end_update()
            died = tasks.create_task(self._engine.wait())
            died.add_done_callback(lambda _task: self._changed.set())
            while self._life.has_engine and not died.done():
                await self._changed.wait()
                self._changed.clear()
            has_died = self._life.has_engine
            if has_died:
                log.error("engine.died", status=died.result(), effect="the node ends")
            elif self._life.state is State.ENDED and not self._status:
                # The engine still answers, so that no router takes the withdrawal for a loss.
                self._announcer.stop()
                await asyncio.wait([announcing], timeout=LEAVE_TIMEOUT_S)
            self._backend.detach()
            linked.cancel()
            died.cancel()
        return has_died

    async def _wait_to_be_turned(self, role: NodeRole, error: TandemError) -> None:
        """Report the failure, and wait until the node changes its role again or is ended."""
        log.error("node.not_turned", role=role, reason=error.message)
        self._life.not_loaded(error.message)
        await self._changes_while(State.FAILED)

    async def _changes_while(self, *states: State) -> None:
        """Wait until the node is in none of these states."""
        while self._life.state in states:
            await self._changed.wait()
            self._changed.clear()


def _reachable(host: str) -> str:
    """Return the address at which this machine reaches its own socket bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────


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
    """Run a node.

    Return 0 after a signal, or 1 if the engine died or a second signal forced the end. Raise the error of an
    engine that could not start. The operators' routes require `operator_key`.
    """
    files = with_chat_template(tokenizer_files(Path(config.engine.model_dir)), config.chat_template)
    tokenizer = Tokenizer.from_files(files) if files else None
    _warn_of_missing_text(tokenizer)
    with listen(config.host, config.port) as sock:
        port = sock.getsockname()[1]
        backend = LocalBackend(config, tokenizer, tokenizer_hash(files))
        announcer = Announcer(config, port, lambda: backend.life.role, operator_key)
        node = Supervisor(config, engine_modules, key, backend, announcer, port=port)
        app = create_app(backend, _options(config, files, operator_key))
        add_routes(app, node)
        async with serving(app, sock):
            outcome = await node.run()
    if isinstance(outcome, TandemError):
        raise outcome
    return outcome


def _warn_of_missing_text(tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        log.warning(
            "tokenizer.missing",
            effect="only input_ids can be served, and no text comes out",
            action="give a directory with tokenizer.json, which save_pretrained of transformers' tokenizers writes, as "
            "--model of the nodes or --tokenizer of the router",
        )
    elif not tokenizer.has_chat_template:
        log.warning(
            "chat_template.missing",
            effect="chats are rejected with 400",
            action="give --chat-template FILE to this node and its peers, or to the router",
        )


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
    """Add the operators' routes to a node's app."""

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

    app.router.add_get("/drain", operators_only(status))
    app.router.add_post("/drain", operators_only(drain))
    app.router.add_post("/role", operators_only(turn))
    app.router.add_post("/update_weights_from_disk", operators_only(update_weights))
