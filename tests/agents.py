"""Builds transfer agents for tests: new epochs, calm time limits and this host are the defaults."""

from tandem.kvtransfer.agents.receiver import DecodeAgent
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.agents.sender_links import SenderEnd
from tandem.kvtransfer.sharding import Shard
from tandem.wire.generation import new_epoch
from tests.calm import calm_receiver, calm_sender


def prefill_agent(
    layout,
    region,
    transports,
    *,
    address="tcp://127.0.0.1:0",
    epoch=None,
    fingerprint="llama",
    ranks=(),
    shard=None,
    stage=0,
    timeouts=None,
    **more,
):
    """Return a started agent. Its maker closes it, and then the region."""
    epoch, shard = epoch or new_epoch(), shard or Shard()
    end = SenderEnd(epoch, fingerprint, layout, region, transports, ranks, shard, stage)
    return PrefillAgent(address, end, timeouts=timeouts or calm_sender(), **more)


def decode_agent(
    layout, region, transports, *, epoch=None, fingerprint="llama", timeouts=None, **more
):
    """Return a started agent. Its maker closes it, and then the region."""
    return DecodeAgent(
        epoch=epoch or new_epoch(),
        fingerprint=fingerprint,
        layout=layout,
        region=region,
        transports=transports,
        timeouts=timeouts or calm_receiver(),
        **more,
    )
