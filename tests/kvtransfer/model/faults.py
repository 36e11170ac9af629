"""What the protocol must survive, and what each fault does to a world."""

from tandem.kvtransfer.session import WriteFailed
from tests.kvtransfer.model.decode import Decode
from tests.kvtransfer.model.prefill import Prefill


def possible(world):
    """Return what may go wrong now."""
    if not world.faults_left:
        return []
    found = [*_faults_of_ends(world), *_faults_of_rooms(world), *_faults_of_links(world)]
    found += [("early", what) for _, what in world.timers()]
    return [fault for fault in found if not world.plan.only or fault[0] in world.plan.only]


def _faults_of_ends(world):
    for who in ("prefill", "decode"):
        end = getattr(world, who)
        if end is None:
            yield ("restart", who)
        else:
            yield ("kill", who)
            if not end.is_stopped:
                yield ("stop", who)


def _faults_of_rooms(world):
    for room in range(world.plan.num_rooms):
        prefill, decode = world.prefill, world.decode
        if prefill and room in prefill.role.keys() - prefill.ended - prefill.aborted:
            yield ("abort", room)
        if decode and room in decode.asked - decode.ended - decode.withdrawn:
            yield ("withdraw", room)


def _faults_of_links(world):
    for number, link in world.links.items():
        if not (link.is_broken or link.is_hung_up):
            yield ("cut", number)
        if world.decode and world.decode.link == number:
            yield ("decode hangs up", number)
        if world.prefill and number in world.prefill.links:
            yield ("prefill hangs up", number)
        if link.to_prefill and link.to_prefill[0][0] != "hello":
            yield ("twice to prefill", number)
        if link.to_decode and link.to_decode[0][0] in ("landed", "released"):
            yield ("twice to decode", number)
        if link.to_decode and link.to_decode[0][0] == "landed":
            yield ("corrupt", number)
    if world.prefill is not None:
        for number, worker in world.prefill.workers.items():
            if worker.running and not worker.is_closed:
                yield ("refuse write", number)
                yield ("break write", number)


def inflict(world, kind, subject):
    """Do one of those that are possible. `early` is a timer that comes before what it waits for."""
    world.faults_left -= 1
    if kind == "early":
        world.happened.add(f"early {subject[0]}")
        world.do(*subject)
    else:
        world.happened.add(kind)
        FAULTS[kind](world, subject)
        world.check_pages()


def _stop(world, who):
    getattr(world, who).is_stopped, world.stopped_at_s = True, world.now_s
    for link in world.links.values():
        if not link.is_broken:
            link.sick_since_s = world.now_s


def _kill(world, who):
    """What it had sent may still arrive; what flies may still land."""
    setattr(world, who, None)
    for number, link in world.links.items():
        epoch = link.prefill_epoch if who == "prefill" else link.decode_epoch
        if epoch == world.seen_epochs[who == "decode"]:
            world.sicken(number)
            (link.to_prefill if who == "prefill" else link.to_decode).clear()
    if who == "decode" or not world.plan.is_one_sided:
        world.flying.clear()


def _restart(world, who):
    world.seen_epochs[who == "decode"] += 1
    epoch = world.seen_epochs[who == "decode"]
    if who == "prefill":
        world.prefill = Prefill(epoch)
    else:
        world.decode = Decode.with_pages(epoch, world.plan.pool_pages)


def _abort(world, room):
    world.prefill.abort(room)


def _withdraw(world, room):
    world.decode.withdraw(room)


def _cut(world, number):
    """A partition: neither end hears the other on this connection any more."""
    world.sicken(number)
    world.links[number].to_prefill.clear()
    world.links[number].to_decode.clear()


def _decode_hangs_up(world, _):
    """It takes a peer that lives for silent: a false alarm."""
    world.decode.drop(world)


def _prefill_hangs_up(world, number):
    world.prefill.drop(world, number)


def _twice_to_prefill(world, number):
    queue = world.links[number].to_prefill
    queue.insert(0, queue[0])


def _twice_to_decode(world, number):
    queue = world.links[number].to_decode
    queue.insert(0, queue[0])


def _corrupt(world, number):
    world.links[number].to_decode[0] = ("corrupted", world.links[number].to_decode[0][1])


def _refuse_write(world, number):
    world.prefill.fail_job(world, number, WriteFailed)


def _break_write(world, number):
    """The writer hears of an error; what it had sent still flies."""
    world.prefill.fail_job(world, number)


FAULTS = {
    "stop": _stop,
    "kill": _kill,
    "restart": _restart,
    "abort": _abort,
    "withdraw": _withdraw,
    "cut": _cut,
    "decode hangs up": _decode_hangs_up,
    "prefill hangs up": _prefill_hangs_up,
    "twice to prefill": _twice_to_prefill,
    "twice to decode": _twice_to_decode,
    "corrupt": _corrupt,
    "refuse write": _refuse_write,
    "break write": _break_write,
}
