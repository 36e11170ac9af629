from pathlib import Path

import pytest
import tokenizers

from frontend.options import TlsFiles
from frontend.tls import server_context
from frontend.tokenizer_files import tokenizer_hash
from router.cluster import Cluster
from router.config import PrefillTarget, RouterConfig
from tests.certificates import make_certificates
from tests.router.fake_node import FakeNode, until
from tests.router.test_backend import cluster, watched
from wire.errors import ConfigInvalid
from wire.node_info import ModelInfo


def tokenizer_files() -> dict[str, str]:
    model = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    return {"tokenizer.json": tokenizers.Tokenizer(model).to_str()}


def model_info(**fields) -> ModelInfo:
    known = {"name": "m", "fingerprint": "model-a", "context_length": 100, "vocab_size": 50}
    return ModelInfo(**known | {"eos_token_ids": []} | fields)


async def test_an_engine_that_restarts_is_used_again_under_its_new_life():
    async with cluster() as setup:
        node = setup.backend._cluster.decodes[0]
        before = node.client
        setup.decodes[0].restart_engine()
        await until(before.lost.is_set)
        assert not setup.backend.health().is_serving
        await until(lambda: node.is_up)
        assert node.client is not before
        assert setup.backend.health().is_serving


async def test_a_tokenizer_is_fetched_once_for_all_nodes_that_have_it():
    files = tokenizer_files()
    model = model_info(tokenizer_hash=tokenizer_hash(files))
    prefills = [FakeNode("prefill", tokenizer_files=files, model=model) for _ in range(2)]
    decodes = [FakeNode("decode", tokenizer_files=files, model=model)]
    async with cluster(prefills=prefills, decodes=decodes) as setup:
        assert setup.backend.model().tokenizer.encode("b") == [1]
        assert sum(node.num_tokenizer_fetches for node in prefills + decodes) == 1


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        (lambda: FakeNode("decode"), "is a decode node and was given as --prefill"),
        (lambda: FakeNode("prefill", is_healthy=False), "says that it is not healthy"),
        (lambda: FakeNode("prefill", bootstrap_port=None), "tells no bootstrap port"),
        (
            lambda: FakeNode("prefill", model=model_info(tokenizer_hash="other")),
            "other files than the node announced",
        ),
        (lambda: FakeNode("prefill", engine_port=1), "does not answer"),
        (lambda: FakeNode("prefill", engine_port="x"), "is not that of a node"),
        (lambda: FakeNode("prefill", engine_port=70000), "is not that of a node"),
        (lambda: FakeNode("prefill", refusal="it loads the model"), "it loads the model"),
    ],
)
async def test_a_node_that_cannot_be_used_is_named_with_the_reason(node, sentence):
    prefill, decode = node(), FakeNode("decode")
    async with prefill.serving(), decode.serving(), watched([prefill], [decode]) as backend:
        await until(lambda: sentence in backend.health().detail)
        assert not backend.health().is_serving


async def test_a_tokenizer_directory_that_is_none_is_refused_at_the_start(tmp_path: Path):
    config = RouterConfig(
        prefills=(PrefillTarget("http://p:1"),),
        decodes=("http://d:1",),
        tokenizer_dir=str(tmp_path),
    )
    with pytest.raises(ConfigInvalid):
        Cluster(config)


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_nodes_over_https_are_used_if_their_authority_is_given(tmp_path: Path, is_trusted):
    files = make_certificates(tmp_path)
    tls = server_context(TlsFiles(files.cert, files.key))
    prefill, decode = FakeNode("prefill"), FakeNode("decode")
    given = {"node_ca_certs": files.ca} if is_trusted else {}
    async with (
        prefill.serving(tls),
        decode.serving(tls),
        watched([prefill], [decode], **given) as backend,
    ):
        if is_trusted:
            await until(lambda: backend.health().is_serving)
        else:
            await until(
                lambda: "give its authority with --node-ca-certs" in backend.health().detail
            )


def test_an_authority_that_cannot_be_read_is_refused_at_the_start(tmp_path: Path):
    with pytest.raises(ConfigInvalid, match=r"--node-ca-certs .*: No such file"):
        RouterConfig(
            prefills=(PrefillTarget("https://p:1"),),
            decodes=("https://d:1",),
            node_ca_certs=str(tmp_path / "none"),
        )
