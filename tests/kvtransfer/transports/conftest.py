"""Leaves out the tests of transports whose libraries do not work here."""

from tests.kvtransfer.makers import cross_process

collect_ignore = [f"test_{name}.py" for name in {"nixl", "ucx"} - {*cross_process()}]
