import random

from tandem.router.metrics import RouterMetrics
from tandem.router.pairing import MAX_PAIRS, Pairing
from tandem.router.policy import POLICIES, Pair


def test_of_many_idle_pairs_those_used_last_are_kept_and_all_that_have_an_attempt():
    pairing = Pairing(None, POLICIES["random"], random.Random(0), RouterMetrics())
    pairs = [Pair("p", f"d{i}") for i in range(MAX_PAIRS + 2)]
    uses = [pairing.begin(pair, 10) for pair in pairs]
    for use in uses[1:]:
        use.num_running -= 1
    again = pairing.begin(pairs[1], 10)
    again.num_running -= 1
    pairing.forget({"p", *(pair.decode for pair in pairs)})
    assert (again is uses[1], again.num_started) == (True, 2)
    assert set(pairs) - set(pairing.uses) == {pairs[2]}
    pairing.forget({"p"})
    assert list(pairing.uses) == pairs[:1]
