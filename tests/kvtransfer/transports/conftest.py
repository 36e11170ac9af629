"""Tests of a transport are collected where the library it stands on is installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("ucxx") else ["test_ucx.py"]
