"""The store of an extra that is not installed is not tested."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("mooncake") else ["test_mooncake.py"]
