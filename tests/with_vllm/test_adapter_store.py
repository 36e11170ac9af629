"""The adapters in a node's memory, with a fake core: which weights an id may name, and when they are removed."""

import json
import mmap
from pathlib import Path

import pytest

from tandem.wire.errors import AdapterLoaded, AdapterNotFound, InvalidRequest
from tandem.wire.messages import LoadAdapter, UnloadAdapter
from tests.patience import until

# vLLM's dependencies raise deprecation warnings on import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


WEIGHTS = "adapter_model.safetensors"


class FakeWorker:
    """Maps the weights of each number into memory, as vLLM does. `on_read` is called after each."""

    def __init__(self):
        self.weights, self.on_read = {}, lambda: None

    def add_lora(self, request):
        assert request.lora_int_id not in self.weights
        with (Path(request.lora_path) / WEIGHTS).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.weights[request.lora_int_id] = mapped
        self.on_read()


class FakeCore:
    """Two workers. As in vLLM, the failure of one must not be raised."""

    def __init__(self):
        self.workers = [FakeWorker(), FakeWorker()]
        self.model_executor = self

    def collective_rpc(self, function, args):
        return [function(worker, *args) for worker in self.workers]

    def remove_lora(self, number):
        for worker in self.workers:
            worker.weights.pop(number, None)

    @property
    def weights(self):
        first, second = ({n: bytes(w) for n, w in each.weights.items()} for each in self.workers)
        assert first == second
        return first


class Rig:
    def __init__(self, directory, limit=8):
        from tandem.vllm.node.adapters import Adapters

        self.core, self.used, self.directory = FakeCore(), set(), directory
        self.adapters = Adapters(self.core, limit, lambda: self.used)

    def write(self, name, weights):
        folder = self.directory / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
        (folder / WEIGHTS).write_bytes(weights)
        return str(folder)

    def load(self, name, path, **fields):
        """Return the id of the loaded adapter, or raise its error."""
        answers = []
        self.adapters.change(LoadAdapter(name=name, path=path, **fields), answers.append)
        until(lambda: answers, self.adapters.poll)
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def unload(self, adapter):
        self.adapters.change(UnloadAdapter(adapter=adapter), lambda _: None)
        self.adapters.poll()

    @property
    def ids(self):
        return [each.id for each in self.adapters.loaded()]

    def weights(self, adapter):
        """Return the weights with which a request for this id runs; None if it is refused."""
        request = self.adapters.find(adapter)
        return None if request is None else self.core.weights[request.lora_int_id]


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def test_id_is_the_name_and_a_hash_of_the_files(rig):
    here, there = rig.write("here", b"one"), rig.write("there", b"one")
    first, second = rig.load("a", here), rig.load("b", there)
    assert first.removeprefix("a@") == second.removeprefix("b@")
    other = rig.load("c", rig.write("other", b"two"))
    assert other.removeprefix("c@") != first.removeprefix("a@")
    assert rig.ids == [first, second, other]


def test_requests_keep_the_weights_of_their_id_when_the_name_is_loaded_again(rig):
    path = rig.write("sql", b"old")
    old = rig.load("sql", path)
    before = rig.adapters.find(old)
    rig.write("sql", b"new")
    with pytest.raises(AdapterLoaded):
        rig.load("sql", path)
    new = rig.load("sql", path, in_place=True)
    assert (rig.weights(old), rig.weights(new)) == (b"old", b"new")
    # vLLM keys cached blocks and active adapters by these.
    after = rig.adapters.find(new)
    assert before.lora_name != after.lora_name
    assert before.lora_int_id != after.lora_int_id


def test_unloaded_adapter_is_removed_after_its_last_request(rig):
    adapter = rig.load("sql", rig.write("sql", b"one"))
    rig.used = {rig.adapters.find(adapter).lora_int_id}
    rig.unload(adapter)
    assert (rig.ids, rig.weights(adapter)) == ([], b"one")
    rig.used = set()
    rig.adapters.poll()
    assert (rig.adapters.find(adapter), rig.core.weights) == (None, {})


def test_adapter_that_is_loaded_again_while_requests_use_it_keeps_its_number(rig):
    path = rig.write("sql", b"one")
    adapter = rig.load("sql", path)
    number = rig.adapters.find(adapter).lora_int_id
    rig.used = {number}
    rig.unload(adapter)
    assert rig.load("sql", path) == adapter
    rig.used = set()
    rig.adapters.poll()
    assert (rig.adapters.find(adapter).lora_int_id, rig.ids) == (number, [adapter])


def test_removed_number_is_never_used_again(rig):
    path, numbers = rig.write("sql", b"one"), []
    for _ in range(3):
        adapter = rig.load("sql", path)
        numbers.append(rig.adapters.find(adapter).lora_int_id)
        rig.unload(adapter)
    assert len(set(numbers)) == 3


def test_weights_do_not_change_with_the_files(rig):
    path = rig.write("sql", b"one")
    rig.core.workers[1].on_read = lambda: rig.write("sql", b"two")
    assert rig.weights(rig.load("sql", path)) == b"one"


def test_vllm_cannot_read_the_files_again_for_a_request(rig):
    adapter = rig.load("sql", rig.write("sql", b"one"))
    assert not Path(rig.adapters.find(adapter).lora_path).exists()


def test_other_files_than_the_other_nodes_have_are_refused(rig):
    path = rig.write("sql", b"one")
    with pytest.raises(InvalidRequest, match="not those that other nodes have loaded"):
        rig.load("sql", path, digest="0" * 32)
    assert rig.core.weights == {}


def test_more_adapters_than_vllm_keeps_in_memory_are_refused(tmp_path):
    rig = Rig(tmp_path, limit=2)
    first, _ = (rig.load(name, rig.write(name, name.encode())) for name in "ab")
    rig.used = {1, 2}
    rig.unload(first)  # a request still uses it
    with pytest.raises(InvalidRequest, match="2 adapters in memory"):
        rig.load("c", rig.write("c", b"c"))
    rig.used = {2}
    rig.adapters.poll()
    assert rig.load("c", rig.write("c", b"c"))


def test_missing_files_are_a_404_in_vllms_words(rig):
    with pytest.raises(AdapterNotFound, match="Loading lora sql failed: No adapter found for /no"):
        rig.load("sql", "/no/such/path")


def test_adapter_that_vllm_rejects_leaves_nothing(rig):
    def reject():
        raise ValueError("LoRA rank 64 is greater than max_lora_rank 16.")

    rig.core.workers[1].on_read = reject
    with pytest.raises(InvalidRequest, match="rank 64 is greater"):
        rig.load("sql", rig.write("sql", b"one"))
    assert (rig.ids, rig.core.weights) == ([], {})


def test_node_without_lora_says_how_to_start_it(tmp_path):
    with pytest.raises(InvalidRequest, match="-- --enable-lora"):
        Rig(tmp_path, limit=0).load("sql", "/sql")
