"""A fleet: the nodes of a cluster that serve one model, and whether a pair of them can serve.

`cluster.py` assigns the nodes. Nodes of one fleet may have different fingerprints, for example during an update of the
weights. A pair needs equal ones, so a fleet serves one fingerprint at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from tandem.frontend.backend import Health, ServedModel
from tandem.frontend.text.tokenizer import Tokenizer
from tandem.router.config import RouterConfig
from tandem.router.nodes.node import Node
from tandem.router.nodes.state import (
    ClusterState,
    RosterEntry,
    usable_fingerprint,
    with_stand_ins,
)
from tandem.telemetry.log import get_logger
from tandem.wire.engine_client import EngineClient
from tandem.wire.errors import LayoutMismatch, NoNodeAvailable
from tandem.wire.generation import SamplingDefaults
from tandem.wire.messages import NodeInfo

log = get_logger(__name__)


def explain(state: ClusterState, fingerprint: str | None) -> Health:
    """Return whether the cluster can serve, and a sentence for operators that names what is missing.

    Args:
        fingerprint: Fingerprint of the model that a pair can serve now; None if no pair can.
    """
    if fingerprint is None:
        return Health(is_serving=False, detail="; ".join(_missing(state)) + "; retrying")
    counts = [
        f"{sum(_is_used(node, fingerprint) for node in nodes)} of {len(nodes)} {role} nodes"
        for role, nodes in (("prefill", state.prefills), ("decode", state.decodes))
    ]
    unused = [
        f"{node.role} {node.url} {_why_unused(node)}"
        for node in (*state.prefills, *state.decodes)
        if node.is_aside or not _is_used(node, fingerprint)
    ]
    return Health(is_serving=True, detail="; ".join([f"{' and '.join(counts)} serve", *unused]))


def _is_used(node: RosterEntry, fingerprint: str) -> bool:
    return node.is_up and node.fingerprint == fingerprint


def _why_unused(node: RosterEntry) -> str:
    if not node.is_up:
        return node.reason
    if node.is_aside:
        return "is put aside: it failed several requests in a row"
    return f"serves another model: {node.fingerprint}"


def _missing(state: ClusterState) -> list[str]:
    """Return the reasons why no pair can serve: roles without a node, or different models."""
    roles = (("prefill", state.prefills), ("decode", state.decodes))
    absent = [
        f"no {role} node reachable: " + ", ".join(f"{node.url} {node.reason}" for node in nodes)
        if nodes
        else f"no {role} node is known"
        for role, nodes in roles
        if not any(node.is_up for node in nodes)
    ]
    if absent:
        return absent
    return [LayoutMismatch(_models(state.prefills), _models(state.decodes)).message]


def _models(nodes: Sequence[RosterEntry]) -> str:
    return ", ".join(sorted({node.fingerprint for node in nodes if node.is_up}))


def servable_adapters(state: ClusterState, fingerprint: str) -> Mapping[str, str]:
    """Return the ids of the adapters that a pair can serve, by name.

    Of several contents of a name it is the one that most nodes have and, while all nodes have both, the newer one. So
    when a name is loaded again, requests get the new content as soon as the last node has it.
    """
    prefill, decode = (
        Counter(
            (each.name, each.id)
            for node in state.up(role)
            if node.fingerprint == fingerprint
            for each in node.load.adapters
        )
        for role in ("prefill", "decode")
    )
    counts, chosen = prefill + decode, dict[str, str]()
    for name, adapter in counts:  # in the order of loading
        num_known = counts[name, chosen.get(name, adapter)]
        if prefill[name, adapter] and decode[name, adapter] and counts[name, adapter] >= num_known:
            chosen[name] = adapter
    return chosen


@dataclass(frozen=True, slots=True)
class _Outlook:
    """The model and health of a fleet at one version of the roster."""

    version: int
    fingerprint: str | None
    health: Health


class Fleet:
    """The nodes that serve one model. All methods return immediately.

    Args:
        nodes: All nodes of the cluster.
        whole: Returns all nodes of the cluster, each of which has been assigned to its fleet.
        tokenizer: Returns a tokenizer by its hash.

    Attributes:
        names: Names of the model that its nodes report; empty before a node is reached.
        has_nodes: Whether a member of the cluster reports this model.
        absent_s: Seconds for which it has had no nodes.
        is_unmatched: Whether it has only decode nodes and another fleet only prefill nodes. Then the models of the nodes
            are probably a mistake, which must be reported: decode nodes do not replace prefill nodes.
        last_model: The model that is served, or was served last; None before the first.
        last_fingerprint: Fingerprint of the pairs that were used last; empty before the first.
    """

    def __init__(
        self,
        config: RouterConfig,
        nodes: Iterable[Node],
        whole: Callable[[], ClusterState],
        tokenizer: Callable[[str], Tokenizer | None],
    ) -> None:
        self.names: tuple[str, ...] = ()
        self.has_nodes = self.is_unmatched = False
        self.absent_s = 0.0
        self.last_model: ServedModel | None = None
        self._nodes, self._whole, self._tokenizer = nodes, whole, tokenizer
        self._threshold = config.local_prefill_threshold
        self._configured_names = config.served_model_names
        self._has_defaults = config.generation_config == "auto"
        # URLs of the nodes of other fleets, and the state without them; None: to be made again.
        self._others = frozenset[str]()
        self._own: ClusterState | None = None
        self.last_fingerprint = ""
        self._outlook = _Outlook(-1, None, Health(is_serving=False, detail=""))
        self._was_serving = False

    @property
    def name(self) -> str:
        """The first of its names; empty before a node is reached."""
        return next(iter(self.names), "")

    def assign(self, nodes: Sequence[NodeInfo], others: frozenset[str]) -> None:
        """Set its nodes.

        Args:
            others: URLs of the nodes of other fleets. Nodes that were never reached belong to every fleet.
        """
        self.has_nodes = bool(nodes)
        self.names = _names(nodes) or self.names
        self._others, self._own = others, None

    def state(self) -> ClusterState:
        """Return its nodes."""
        whole = self._whole()
        if not self._others:
            return whole
        if self._own is None or self._own.version != whole.version:
            prefills, decodes = (
                tuple(node for node in nodes if node.url not in self._others)
                for nodes in (whole.prefills, whole.decodes)
            )
            # Candidates have one fingerprint, and all nodes with a fingerprint are in one fleet.
            self._own = replace(whole, prefills=prefills, decodes=decodes)
        return self._own

    def servable(self) -> ClusterState:
        """Return the nodes to choose a pair from, with decode nodes in place of missing prefill nodes."""
        state = self.state()
        return state if self.is_unmatched else with_stand_ins(state, self._threshold)

    def fingerprint(self) -> str:
        """Return the fingerprint served now. Raises `NoNodeAvailable`."""
        outlook = self.refresh()
        if outlook.fingerprint is None:
            raise NoNodeAvailable(outlook.health.detail)
        if outlook.fingerprint != self.last_fingerprint:
            log.info(
                "cluster.serves", fingerprint=outlook.fingerprint, before=self.last_fingerprint
            )
            self.last_fingerprint = outlook.fingerprint
        return outlook.fingerprint

    def health(self) -> Health:
        """Return whether a pair can serve now, and what is missing."""
        return self.refresh().health

    def model(self) -> ServedModel:
        """Return the model served now. Raises `NoNodeAvailable`."""
        self.fingerprint()
        assert self.last_model is not None
        return self.last_model

    def clients(self) -> Mapping[str, EngineClient]:
        """Return the clients of the nodes with the fingerprint served now, by role and URL. Raises `NoNodeAvailable`."""
        fingerprint = self.fingerprint()
        return {
            f"{node.role} {node.url}": node.client
            for node in self._nodes
            if node.client is not None and node.info is not None
            if node.info.model.fingerprint == fingerprint
        }

    def refresh(self) -> _Outlook:
        """Update and return its outlook, and log a change of its health."""
        state = self.state()
        if self._outlook.version != state.version:
            usable = usable_fingerprint(self.servable(), preferred=self.last_fingerprint)
            self._outlook = _Outlook(state.version, usable, explain(state, usable))
            if usable is not None:
                self.last_model = self._model_of(usable)
            self._log_health(self._outlook.health)
        return self._outlook

    def _log_health(self, health: Health) -> None:
        if health.is_serving != self._was_serving:
            self._was_serving = health.is_serving
            event = "cluster.serving" if health.is_serving else "cluster.not_serving"
            log.info(event, model=self.name, detail=health.detail)

    def _model_of(self, fingerprint: str) -> ServedModel:
        infos = [node.info for node in self._nodes if node.info is not None and node.is_up]
        infos = [info for info in infos if info.model.fingerprint == fingerprint]
        model = infos[0].model
        limits = [info.max_prompt_tokens for info in infos if info.max_prompt_tokens]
        name, *aliases = self._configured_names or _names(infos)
        return ServedModel(
            name=name,
            context_length=model.context_length,
            max_prompt_tokens=min([model.context_length - 1, *limits]),
            vocab_size=model.vocab_size,
            eos_token_ids=frozenset(model.eos_token_ids),
            tokenizer=self._tokenizer(model.tokenizer_hash),
            default_sampling=model.default_sampling if self._has_defaults else SamplingDefaults(),
            weight_version=model.weight_version,
            adapters=servable_adapters(self.servable(), fingerprint),
            aliases=tuple(aliases),
        )


def _names(infos: Iterable[NodeInfo]) -> tuple[str, ...]:
    """Return the names of a model that some nodes report, in their order."""
    names = [name for info in infos for name in (info.model.name, *info.model.aliases)]
    return tuple(dict.fromkeys(names))
