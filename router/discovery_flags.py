"""The flags that say where a router finds nodes that come and go, and how they are read."""

import argparse
import dataclasses
from collections.abc import Mapping

from tandem.router.config import DnsTarget, KubernetesTarget, node_url
from tandem.router.node import ROLES
from tandem.wire.errors import ConfigInvalid


def add_discovery_flags(group: argparse._ArgumentGroup) -> None:
    """Add them."""
    defaults = KubernetesTarget()
    group.add_argument(
        "--discover-announced",
        action="store_true",
        help="start without nodes: they announce themselves, or are added with POST /nodes. Both work "
        "without this flag too, which says that no other source is needed",
    )
    group.add_argument(
        "--discover-dns",
        action="extend",
        nargs="+",
        default=[],
        metavar="[ROLE=]HOST:PORT",
        help="every address of this name is a node, such as prefill=prefill.tandem:7000; without "
        "a role each node is asked; may be repeated",
    )
    group.add_argument(
        "--discover-kubernetes",
        action="store_true",
        help="pods with the labels below are nodes; the router's service account must be allowed to "
        "list and watch pods",
    )
    group.add_argument(
        "--kubernetes-prefill-selector",
        default="",
        metavar="LABELS",
        help="labels of prefill pods, such as app=tandem,role=prefill",
    )
    group.add_argument(
        "--kubernetes-decode-selector", default="", metavar="LABELS", help="labels of decode pods"
    )
    group.add_argument(
        "--kubernetes-namespace",
        default="",
        metavar="NAME",
        help="where the pods are (default: where the router's own pod is)",
    )
    group.add_argument(
        "--kubernetes-port",
        default=defaults.port,
        metavar="PORT",
        help="port of their HTTP: a number, or its name in the pods (default: %(default)s)",
    )
    group.add_argument(
        "--kubernetes-api",
        default="",
        metavar="URL",
        help="of the API (default: that of the router's own cluster); `kubectl proxy` gives one to a "
        "router outside",
    )


def read_dns(args: argparse.Namespace) -> tuple[DnsTarget, ...]:
    """Return the names to find nodes by.

    Raises:
        ConfigInvalid: One is no name with a port, or has an unknown role.
    """
    return tuple(dict.fromkeys(_dns_target(text) for text in args.discover_dns))


def _dns_target(text: str) -> DnsTarget:
    role, has_role, name = text.rpartition("=")
    host, _, port = name.rpartition(":")
    try:
        node_url(f"http://{name}")
        is_whole = role in ROLES if has_role else True
    except ConfigInvalid:
        is_whole = False
    if not is_whole:
        raise ConfigInvalid(
            f"--discover-dns {text}: give prefill=HOST:PORT, decode=HOST:PORT, or HOST:PORT to ask "
            "each node for its role",
            topic="membership#dns",
        )
    return DnsTarget(host, int(port), role)


def read_kubernetes(args: argparse.Namespace) -> KubernetesTarget | None:
    """Return how pods are found; None when they are not to be.

    Raises:
        ConfigInvalid: No labels are given, or labels without the flag that asks for pods.
    """
    selectors = (args.kubernetes_prefill_selector, args.kubernetes_decode_selector)
    if args.discover_kubernetes != any(selectors):
        raise ConfigInvalid(
            "--discover-kubernetes goes with --kubernetes-prefill-selector or "
            "--kubernetes-decode-selector: give the labels of the pods that are nodes",
            topic="membership#kubernetes",
        )
    if not args.discover_kubernetes:
        return None
    return KubernetesTarget(
        api_url=args.kubernetes_api,
        namespace=args.kubernetes_namespace,
        prefill_selector=selectors[0],
        decode_selector=selectors[1],
        port=args.kubernetes_port,
    )


def in_pod(
    target: KubernetesTarget | None, environment: Mapping[str, str]
) -> KubernetesTarget | None:
    """Return the target with the API that a pod's environment names, unless one was given.

    Raises:
        ConfigInvalid: There is none.
    """
    if target is None or target.api_url:
        return target
    host, port = (environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not host:
        raise ConfigInvalid(
            "--discover-kubernetes: this is no pod (KUBERNETES_SERVICE_HOST is not set): give "
            "--kubernetes-api, such as that of `kubectl proxy`",
            topic="membership#kubernetes",
        )
    host = f"[{host}]" if ":" in host else host
    return dataclasses.replace(target, api_url=f"https://{host}:{port or 443}")
