import random

from tandem.router.metrics import RouterMetrics
from tandem.router.pairing.pairing import MAX_PAIRS, Pairing
from tandem.router.pairing.policy import POLICIES, Pair


def test_pair_statistics_keep_running_pairs_and_evict_the_least_recently_used():
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
