"""Leaves out the tests of NIXL where its library does not work."""

from tests.kvtransfer.makers import cross_process

collect_ignore = [] if "nixl" in cross_process() else ["test_nixl.py"]
