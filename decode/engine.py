"""`python -m tandem.decode.engine`: the engine process of a decode node, started by its HTTP process."""

from typing_extensions import override

from tandem.decode.role import DecodeRole
from tandem.kvtransfer.group import DecodeGroup
from tandem.node.engine_host import Parts, main
from tandem.node.quick_process import end_process
from tandem.node.rank_agent import RemoteReceiver
from tandem.node.transfer import make_receiver
from tandem.node.transfer_host import TransferHost


class _Host(TransferHost):
    @override
    def role(self, parts: Parts) -> DecodeRole:
        self.agent = own = make_receiver(parts.config, self.end(parts), parts.waker, parts.key)
        parts.measures.transfers = own.times
        others = [RemoteReceiver(rank) for rank in parts.others]
        return DecodeRole(
            parts.engine,
            DecodeGroup(own, others) if others else own,
            parts.answers,
            max_running=parts.config.engine.max_running_requests,
            max_waiting=parts.config.engine.max_waiting_requests,
            tiering=parts.tiering,
        )


if __name__ == "__main__":
    end_process(main(_Host()))
