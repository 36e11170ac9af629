"""Leaves out the tests of transports whose libraries do not work here."""

from tests.kvtransfer.installed import cross_process

collect_ignore = [f"test_{name}.py" for name in {"nixl", "mooncake", "ucx"} - {*cross_process()}]
