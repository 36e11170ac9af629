"""`python -m tandem.prefill.engine`: the engine process of a prefill node, started by its HTTP process."""

from typing_extensions import override

from tandem.kvtransfer.group import PrefillGroup
from tandem.node.engine_host import Parts, main
from tandem.node.quick_process import end_process
from tandem.node.rank_agent import RemoteSender
from tandem.node.transfer import make_sender
from tandem.node.transfer_host import TransferHost
from tandem.prefill.role import PrefillRole


class _Host(TransferHost):
    _port: int | None = None

    @override
    def role(self, parts: Parts) -> PrefillRole:
        self.agent = own = make_sender(
            parts.config,
            self.end(parts),
            parts.waker,
            parts.key,
            port=parts.config.transfer.bootstrap_port,
            rank_ports=[rank.bootstrap_port for rank in parts.others],
        )
        self._port = own.port
        parts.measures.transfers = own.times
        others = [RemoteSender(rank) for rank in parts.others]
        return PrefillRole(
            parts.engine,
            PrefillGroup(own, others) if others else own,
            parts.answers,
            parts.config.engine.max_waiting_requests,
            tiering=parts.tiering,
            pushes_layers=parts.config.transfer.push_granularity == "layer",
        )

    @override
    def bootstrap_port(self) -> int | None:
        return self._port


if __name__ == "__main__":
    end_process(main(_Host()))
