"""Routes by which an operator changes a node: drain it, and turn it into the other role."""

from typing import Annotated, Literal, Protocol

import msgspec
from aiohttp import web
from pydantic import Field

from tandem.frontend.body import Body, read_json, validate
from tandem.frontend.limits import expect
from tandem.frontend.middleware import json_response
from tandem.frontend.operators import operators_only
from tandem.node.config import MAX_DRAIN_S


class DrainBody(Body):
    """`POST /drain`."""

    timeout_s: Annotated[float, Field(ge=0, le=MAX_DRAIN_S)] | None = None
    cancel: bool = False


class RoleBody(Body):
    """`POST /role`."""

    role: Literal["prefill", "decode"]


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is answered: how far the node is.

    Attributes:
        detail: The state for people.
        num_left: Requests that the node still has to do with.
        remaining_s: Until what is left is handed over; None unless the node drains.
    """

    role: str
    state: str
    detail: str
    num_left: int
    remaining_s: float | None = None


class Operated(Protocol):
    """A node that can be operated."""

    def status(self) -> NodeStatus:
        """Return how far it is."""
        ...

    def drain(self, timeout_s: float | None) -> None:
        """Take nothing new, finish what is in, hand over what is left then.

        Args:
            timeout_s: None takes that of the command line.

        Raises:
            NotNow: The node serves nothing.
        """
        ...

    def resume(self) -> None:
        """Take requests again.

        Raises:
            NotNow: The node serves nothing, or is about to end.
        """
        ...

    def turn(self, role: Literal["prefill", "decode"]) -> None:
        """Begin to become the other role.

        Raises:
            InvalidRequest: The node has both roles.
            NotNow: It has requests, or is in no state to.
        """
        ...


def add_routes(app: web.Application, node: Operated) -> None:
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
