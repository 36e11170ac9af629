"""The sources of nodes that a configuration names."""

from tandem.router.config import RouterConfig
from tandem.router.discovery_dns import DnsSource
from tandem.router.discovery_kubernetes import KubernetesSource
from tandem.router.membership import Source


def sources_of(config: RouterConfig) -> list[Source]:
    """Return them.

    Raises:
        ConfigInvalid: One cannot be set up.
    """
    sources: list[Source] = [DnsSource(target) for target in config.dns]
    if (pods := config.kubernetes) is not None:
        selectors = {"prefill": pods.prefill_selector, "decode": pods.decode_selector}
        sources += [
            KubernetesSource(pods, role, selector)
            for role, selector in selectors.items()
            if selector
        ]
    return sources
