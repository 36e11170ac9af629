"""The installed version of Tandem."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the installed version, or `0+source` when run from a checkout."""
    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "0+source"
