"""`python -m decode.engine`: the engine process of a decode node, started by its HTTP process."""

import sys

from typing_extensions import override

from decode.role import DecodeRole
from kvtransfer.group import DecodeGroup
from node.engine_host import Parts, main
from node.rank_agent import RemoteReceiver
from node.transfer import make_receiver
from node.transfer_host import TransferHost


class _Host(TransferHost):
    @override
    def role(self, parts: Parts) -> DecodeRole:
        self.agent = own = make_receiver(parts.config, self.end(parts), parts.waker, parts.key)
        others = [RemoteReceiver(rank) for rank in parts.others]
        return DecodeRole(
            parts.engine,
            DecodeGroup(own, others) if others else own,
            parts.answers,
            max_running=parts.config.engine.max_running_requests,
            max_waiting=parts.config.engine.max_waiting_requests,
        )


if __name__ == "__main__":
    sys.exit(main(_Host()))
