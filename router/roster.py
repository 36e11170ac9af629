"""The nodes that a router knows, and a view of them that costs what has changed.

Every request asks for the view, and every engine tells its load five times a second: with hundreds of
nodes only those that changed since the last time are looked at.
"""

from collections.abc import Callable, Iterator

from typing_extensions import override

from tandem.router.node import ROLES, Node
from tandem.router.policy import ClusterSnapshot, NodeSnapshot

Outline = tuple[object, ...]


class Roster:
    """Nodes by URL, in the order they came.

    Attributes:
        version: Higher whenever more than load has changed: who is there, who is up or put aside and why not,
            and what they serve. Current after `snapshot`.
        on_change: Called at every change of any node.
    """

    def __init__(self) -> None:
        self.version = 0
        self.on_change: Callable[[], None] = lambda: None
        self._nodes: dict[str, Node] = {}
        self._changed: dict[str, None] = {}
        self._outlines: dict[str, Outline] = {}
        self._shown: dict[str, dict[str, NodeSnapshot]] = {role: {} for role in sorted(ROLES)}
        self._snapshot = ClusterSnapshot(prefills=(), decodes=())

    @override
    def __repr__(self) -> str:
        return f"<Roster {len(self._nodes)} nodes version={self.version}>"

    def __iter__(self) -> Iterator[Node]:
        return iter(tuple(self._nodes.values()))

    def find(self, url: str) -> Node | None:
        """Return the node of a URL, if it is known."""
        return self._nodes.get(url)

    def of_role(self, role: str) -> list[Node]:
        """Return the nodes that are of a role now."""
        return [node for node in self._nodes.values() if node.role == role]

    def add(self, node: Node) -> None:
        """Add a node, whose `on_change` is `note_change`."""
        self._nodes[node.url] = node
        self.note_change(node)

    def remove(self, node: Node) -> None:
        """Forget a node."""
        del self._nodes[node.url]
        self.note_change(node)

    def note_change(self, node: Node) -> None:
        """Look at this node again before the next view."""
        self._changed[node.url] = None
        self.on_change()

    def snapshot(self) -> ClusterSnapshot:
        """Return all nodes whose role is known, at this moment."""
        if self._changed:
            for url in self._changed:
                self._look_at(url)
            self._changed.clear()
            self._snapshot = ClusterSnapshot(
                prefills=tuple(self._shown["prefill"].values()),
                decodes=tuple(self._shown["decode"].values()),
            )
        return self._snapshot

    def _look_at(self, url: str) -> None:
        node = self._nodes.get(url)
        outline = _outline(node)
        if outline != self._outlines.get(url):
            self.version += 1
            self._outlines[url] = outline
        if node is None:
            del self._outlines[url]
        for role, shown in self._shown.items():
            if node is not None and node.role == role:
                shown[url] = node.snapshot()
            else:
                shown.pop(url, None)


def _outline(node: Node | None) -> Outline:
    """Return what of a node changes only with its life."""
    if node is None:
        return ()
    model, limit = (node.info.model, node.info.max_prompt_tokens) if node.info else (None, 0)
    return (node.role, node.is_up, node.is_aside, node.shown_reason, model, limit)
