import asyncio
import gc
import weakref
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import structlog
import tokenizers

from tandem.frontend.options import HttpOptions, TlsFiles, server_context
from tandem.frontend.text.tokenizer import tokenizer_hash
from tandem.router.config import PrefillTarget, RouterConfig
from tandem.router.membership.membership import Member, Members
from tandem.router.nodes import watch
from tandem.router.nodes.cluster import Cluster
from tandem.router.nodes.node import Node
from tandem.router.nodes.prefixes import NodePrefixes
from tandem.router.nodes.watch import (
    FIRST_ANSWER_TIMEOUT_S,
    INFO_TIMEOUT_S,
    LAST_RETRY_S,
    TOKENIZER_TIMEOUT_S,
)
from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import SamplingDefaults
from tandem.wire.keys import operator_key, reader_key
from tandem.wire.messages import LoadedAdapter, ModelInfo, NodeLoad
from tests.certificates import make_certificates
from tests.patience import until_async
from tests.router.fake_node import FakeNode, request
from tests.router.test_backend import cluster, reading, watched


def tokenizer_files(*words: str) -> dict[str, str]:
    vocabulary = {word: number for number, word in enumerate(words or ("a", "b"))}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="a")
    return {"tokenizer.json": tokenizers.Tokenizer(model).to_str()}


def model_info(**fields) -> ModelInfo:
    known = {"name": "m", "fingerprint": "model-a", "context_length": 100, "vocab_size": 50}
    return ModelInfo(**known | {"eos_token_ids": []} | fields)


async def test_restarted_engine_is_used_with_its_new_epoch():
    async with cluster() as setup:
        node = setup.backend._cluster.decodes[0]
        before, told, seen = node.client, node.client._on_change, []

        def look() -> None:
            told()
            seen.append((before.lost.is_set(), setup.backend.health().is_serving))

        before._on_change = look  # the next life may be up before a test looks again
        setup.decodes[0].restart_engine()
        await until_async(before.lost.is_set)
        assert (True, False) in seen
        await until_async(lambda: node.is_up and node.client is not before)
        assert setup.backend.health().is_serving


async def test_load_report_that_raises_reconnects_only_its_own_link(monkeypatch):
    async with cluster() as setup:
        node = setup.backend._cluster.decodes[0]
        before, set_tiers, failures = (
            node.client,
            NodePrefixes.set_tiers,
            iter([ValueError("unreadable")]),
        )

        def breaking(prefixes, load) -> None:
            if prefixes is node.prefixes:
                for failure in failures:
                    raise failure
            set_tiers(prefixes, load)

        monkeypatch.setattr(NodePrefixes, "set_tiers", breaking)
        with structlog.testing.capture_logs() as logs:
            await until_async(lambda: node.client is not before and node.is_up)
        assert [one["url"] for one in logs if one["event"] == "node.link_failed"] == [node.url]
        assert setup.backend.health().is_serving


async def test_invalid_response_is_polled_again_and_affects_no_other_node(
    monkeypatch,
):
    checks, failures = Node.validate, iter([ValueError("unreadable")])

    def breaking(node, info) -> None:
        for failure in failures:
            raise failure
        checks(node, info)

    monkeypatch.setattr(Node, "validate", breaking)
    with structlog.testing.capture_logs() as logs:
        async with cluster() as setup:
            assert setup.backend.health().is_serving
    assert [one["event"] for one in logs].count("node.watch_failed") == 1


async def test_node_not_started_yet_is_awaited_and_a_stopped_one_is_down():
    prefill, place, decode = FakeNode("prefill"), FakeNode("decode"), FakeNode("decode")
    with structlog.testing.capture_logs() as logs:
        async with prefill.serving(), AsyncExitStack() as stack:
            async with place.serving():
                pass
            backend = await stack.enter_async_context(watched([prefill], [place]))
            await until_async(lambda: any(one["event"] == "node.awaited" for one in logs))
            assert not [one for one in logs if one["log_level"] == "warning"]
            async with decode.serving(port=int(place.url.rpartition(":")[2])):
                await until_async(lambda: backend.health().is_serving)
            await until_async(lambda: any(one["event"] == "node.down" for one in logs))


async def test_node_that_has_never_answered_is_awaited_for_any_reason():
    prefill, absent = FakeNode("prefill"), FakeNode("decode")
    async with absent.serving():
        pass
    absent.url = "http://nowhere.invalid:7001"  # such as a Service that does not exist yet
    with structlog.testing.capture_logs() as logs:
        async with prefill.serving(), watched([prefill], [absent]):
            await until_async(lambda: any(one["event"] == "node.awaited" for one in logs))
    assert not [one for one in logs if one["log_level"] == "warning"]


async def test_node_that_answers_and_cannot_be_used_is_a_warning_even_at_its_start():
    prefill, node = FakeNode("prefill"), FakeNode("decode", refusal="its model is gone")
    with structlog.testing.capture_logs() as logs:
        async with prefill.serving(), node.serving(), watched([prefill], [node]):
            await until_async(lambda: any(one["event"] == "node.unusable" for one in logs))
    assert {one["log_level"] for one in logs if one["event"] == "node.unusable"} == {"warning"}


async def test_node_that_drains_and_exits_logs_no_warning():
    prefill, decode = FakeNode("prefill"), FakeNode("decode")
    with structlog.testing.capture_logs() as logs:
        async with prefill.serving(), AsyncExitStack() as stack:
            async with decode.serving():
                backend = await stack.enter_async_context(watched([prefill], [decode]))
                await until_async(lambda: backend.health().is_serving)
                decode.now_says(is_draining=True)
                await until_async(lambda: any(one["event"] == "node.draining" for one in logs))
            await until_async(lambda: any(one["event"] == "node.awaited" for one in logs))
    assert not [one for one in logs if one["log_level"] == "warning"]


async def test_node_that_loads_its_model_is_polled_without_longer_waits(monkeypatch):
    monkeypatch.setattr(watch, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(watch, "LAST_RETRY_S", 1000.0)
    prefill, node = FakeNode("prefill"), FakeNode("decode", refusal="loading the model")
    async with prefill.serving(), node.serving(), watched([prefill], [node]) as backend:
        await until_async(lambda: node.num_polls > 15)  # doubled waits would take minutes
        node.refusal = ""
        await until_async(lambda: backend.health().is_serving)


async def test_node_restarted_at_its_address_serves_within_five_seconds():
    # What one visit may take at worst, a pause behind it, and the first answer of the new engine.
    assert INFO_TIMEOUT_S + LAST_RETRY_S + FIRST_ANSWER_TIMEOUT_S <= 5
    prefill, first_life, second_life = FakeNode("prefill"), FakeNode("decode"), FakeNode("decode")
    async with prefill.serving(), AsyncExitStack() as stack:
        async with first_life.serving():
            backend = await stack.enter_async_context(watched([prefill], [first_life]))
            await until_async(lambda: backend.health().is_serving)
        await until_async(lambda: not backend.health().is_serving)
        async with second_life.serving(port=int(first_life.url.rpartition(":")[2])):
            await until_async(lambda: backend.health().is_serving)  # which waits for 5 s
            (node,) = backend._cluster.decodes
            assert node.info.epoch == second_life.engine.epoch


async def test_draining_node_gets_no_new_requests_and_keeps_its_streams():
    async with cluster(num_decodes=2) as setup, reading(setup) as running:
        _, _, decode, start_decode = await setup.pair_of()
        decode.now_says(is_draining=True)
        node = setup.backend._cluster.node(decode.url)
        await until_async(lambda: not node.is_up)
        assert f"{decode.url} is draining" in setup.backend.health().detail
        async with reading(setup, request(request_id="r2")) as later:
            _, _, other, start_other = await setup.pair_of()
            assert other is setup.others(decode)
            other.engine.say(start_other, 0, [9], "stop")
            assert await later.result() == ([9], "stop")
        decode.engine.say(start_decode, 0, [7, 8], "stop")
        assert await running.result() == ([7, 8], "stop")
        decode.now_says(is_draining=False)
        await until_async(lambda: node.is_up)


async def test_node_that_switches_its_role_is_used_in_the_new_role():
    prefills, decodes = [FakeNode("prefill") for _ in range(2)], [FakeNode("decode")]
    async with cluster(prefills=prefills, decodes=decodes) as setup:
        turned = prefills[1]
        turned.role = "decode"
        turned.restart_engine()
        await until_async(lambda: len(setup.backend._cluster.state().decodes) == 2)
        assert [n.url for n in setup.backend._cluster.state().prefills] == [prefills[0].url]
        await until_async(lambda: all(n.is_up for n in setup.backend._cluster.state().decodes))
        turned.role = "prefill"
        turned.restart_engine()
        await until_async(lambda: len(setup.backend._cluster.state().prefills) == 2)


async def test_removed_node_finishes_its_streams_and_is_then_forgotten():
    prefills, decodes = [FakeNode("prefill")], [FakeNode("decode") for _ in range(2)]
    async with cluster(prefills=prefills, decodes=decodes) as setup:
        async with reading(setup) as running:
            _, _, decode, start = await setup.pair_of()
            watched_cluster = setup.backend._cluster
            setup.announce(decode.url, is_removed=True)
            node = watched_cluster.node(decode.url)
            assert (node.is_up, node.shown_reason) == (False, "was removed")
            assert [n.is_up for n in watched_cluster.state().decodes].count(True) == 1
            decode.engine.say(start, 0, [7], "stop")
            assert await running.result() == ([7], "stop")
        await until_async(lambda: watched_cluster.roster.find(decode.url) is None)
        assert not watched_cluster.node(decode.url).is_up
        setup.announce(decode.url)
        await until_async(lambda: watched_cluster.node(decode.url).is_up)


@pytest.mark.parametrize("hands_over", [False, True])
async def test_node_that_returns_at_any_moment_of_its_removal_is_used(hands_over):
    async with cluster() as setup:
        url, watched_cluster = setup.decodes[0].url, setup.backend._cluster
        members = watched_cluster.members
        others = [member for member in members.members if member.url != url]
        for num_turns in range(20):  # of the loop, until its link is closed
            watched_cluster.apply(Members(members=others, handing_over=[url] * hands_over))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            watched_cluster.apply(members)
            for _ in range(100):
                await asyncio.sleep(0)
            await until_async(lambda: watched_cluster.node(url).is_up)


async def test_node_removed_with_hand_over_moves_streams_without_using_an_attempt():
    async with cluster(num_decodes=2, max_attempts=1) as setup, reading(setup) as running:
        _, _, decode, start = await setup.pair_of()
        decode.engine.say(start, 0, [7])
        await until_async(lambda: running.token_ids == [7])
        setup.announce(decode.url, is_removed=True, hands_over=True)
        _, _, other, start = await setup.pair_of(attempt=1)
        assert other is setup.others(decode)
        assert start.request.prompt_ids == [1, 2, 3, 7]
        other.engine.say(start, 1, [8], "stop")
        assert await running.result() == ([7, 8], "stop")
        await until_async(lambda: setup.backend._cluster.roster.find(decode.url) is None)


async def test_node_announced_without_a_role_gets_it_from_server_info():
    prefills, decodes, third = [FakeNode("prefill")], [FakeNode("decode")], FakeNode("decode")
    async with third.serving(), cluster(prefills=prefills, decodes=decodes) as setup:
        setup.announce(third.url)
        assert setup.backend._cluster.node(third.url).role == ""
        await until_async(lambda: setup.backend._cluster.node(third.url).is_up)
        assert third.url in [node.url for node in setup.backend._cluster.state().decodes]


async def test_tokenizer_is_freed_when_no_node_serves_its_model():
    files = [tokenizer_files("a", "b"), tokenizer_files("b", "a")]
    models = [
        model_info(fingerprint=f"model-{number}", tokenizer_hash=tokenizer_hash(each))
        for number, each in enumerate(files)
    ]
    prefill, decode = (
        FakeNode(role, tokenizer_files=files[0], model=models[0]) for role in ("prefill", "decode")
    )
    async with prefill.serving(), decode.serving(), watched([prefill], [decode]) as backend:
        await until_async(lambda: backend.health().is_serving)
        held = weakref.ref(backend.models().choose(None).tokenizer)
        for each in (prefill, decode):
            each.now_has(files[1], models[1])
        await until_async(
            lambda: (
                backend.health().is_serving
                and backend.models().choose(None).tokenizer is not held()
            )
        )
        assert backend.models().choose(None).tokenizer.encode("b") == [0]
        gc.collect()
        assert held() is None


async def test_tokenizer_is_fetched_once_for_all_nodes():
    files = tokenizer_files()
    model = model_info(tokenizer_hash=tokenizer_hash(files))
    prefills = [FakeNode("prefill", tokenizer_files=files, model=model) for _ in range(2)]
    decodes = [FakeNode("decode", tokenizer_files=files, model=model)]
    async with cluster(prefills=prefills, decodes=decodes) as setup:
        assert setup.backend.models().choose(None).tokenizer.encode("b") == [1]
        assert sum(node.num_tokenizer_fetches for node in prefills + decodes) == 1


@pytest.mark.parametrize("num_hung", [1, 2])
async def test_hung_tokenizer_of_some_nodes_delays_no_other_node(monkeypatch, num_hung):
    monkeypatch.setattr(watch, "TOKENIZER_TURN_S", 0.05)
    files = tokenizer_files()
    model = model_info(tokenizer_hash=tokenizer_hash(files))
    *hung, prefill, decode = (
        FakeNode(role, tokenizer_files=files, model=model)
        for role in (*["prefill"] * num_hung, "prefill", "decode")
    )
    async with AsyncExitStack() as stack:
        for node in (*hung, prefill, decode):
            await stack.enter_async_context(node.serving())
        for node in hung:
            node.serves_tokenizer.clear()
        backend = await stack.enter_async_context(watched([*hung, prefill], [decode]))
        joined, find = backend._cluster.members, backend._cluster.node
        backend._cluster.apply(Members(members=joined.members[:num_hung]))
        # They are asked first.
        await until_async(lambda: all(node.num_tokenizer_fetches for node in hung))
        backend._cluster.apply(joined)
        await until_async(lambda: backend.health().is_serving, within_s=TOKENIZER_TIMEOUT_S)
        before = find(decode.url).client
        decode.restart_engine()
        await until_async(
            lambda: find(decode.url).is_up and find(decode.url).client is not before,
            within_s=TOKENIZER_TIMEOUT_S,
        )
        assert not any(find(node.url).is_up for node in hung)
        for node in hung:
            node.serves_tokenizer.set()
        await until_async(lambda: all(find(node.url).is_up for node in hung))


async def test_chat_template_of_the_router_overrides_that_of_the_nodes():
    files = {**tokenizer_files(), "chat_template.jinja": "of the node"}
    model = model_info(tokenizer_hash=tokenizer_hash(files))
    nodes = [FakeNode(role, tokenizer_files=files, model=model) for role in ("prefill", "decode")]
    template = "{{ messages | length }}"
    async with cluster(prefills=nodes[:1], decodes=nodes[1:], chat_template=template) as setup:
        assert setup.backend.models().choose(None).tokenizer.render_chat([{}, {}]) == "2"


async def test_served_model_lists_the_adapters_of_the_nodes():
    nodes = [FakeNode(role) for role in ("prefill", "decode")]
    for node in nodes:
        node.engine.load = NodeLoad(adapters=[LoadedAdapter(id="sql@1", path="/sql")])
    async with cluster(prefills=nodes[:1], decodes=nodes[1:]) as setup:
        assert setup.backend.models().choose(None).adapters == {"sql": "sql@1"}


@pytest.mark.parametrize("taken", ["auto", "none"])
async def test_sampling_defaults_come_from_nodes_unless_generation_config_disables_them(taken):
    told = SamplingDefaults(temperature=0.25, top_k=7)
    nodes = [
        FakeNode(role, model=model_info(default_sampling=told)) for role in ("prefill", "decode")
    ]
    async with cluster(prefills=nodes[:1], decodes=nodes[1:], generation_config=taken) as setup:
        expected = told if taken == "auto" else SamplingDefaults()
        assert setup.backend.models().choose(None).default_sampling == expected


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        (lambda: FakeNode("colocated"), "is a colocated node, not a prefill or decode node"),
        (lambda: FakeNode("prefill", is_healthy=False), "reports that it is not healthy"),
        (lambda: FakeNode("prefill", bootstrap_port=None), "reports no bootstrap port"),
        (
            lambda: FakeNode("prefill", model=model_info(tokenizer_hash="other")),
            "do not match the hash in its /server_info",
        ),
        (lambda: FakeNode("prefill", engine_port=1), "does not answer"),
        (lambda: FakeNode("prefill", engine_port="x"), "its /server_info is invalid"),
        (lambda: FakeNode("prefill", engine_port=70000), "its /server_info is invalid"),
        (lambda: FakeNode("prefill", refusal="it loads the model"), "it loads the model"),
    ],
)
async def test_health_names_an_unusable_node_with_the_reason(monkeypatch, node, sentence):
    monkeypatch.setattr(watch, "FIRST_ANSWER_TIMEOUT_S", 0.1)
    prefill, decode = node(), FakeNode("decode")
    async with prefill.serving(), decode.serving(), watched([prefill], [decode]) as backend:
        await until_async(lambda: sentence in backend.health().detail)
        assert not backend.health().is_serving


async def test_deeply_nested_node_info_makes_only_the_node_unusable():
    node, decode = FakeNode("prefill"), FakeNode("decode")
    node.raw_info = b'{"a":' + b"[" * 100_000
    async with node.serving(), decode.serving(), watched([node], [decode]) as backend:
        await until_async(lambda: "/server_info is invalid" in backend.health().detail)


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_https_nodes_need_their_certificate_authority(tmp_path: Path, is_trusted):
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
            await until_async(lambda: backend.health().is_serving)
        else:
            await until_async(
                lambda: "set --node-ca-certs to its authority" in backend.health().detail
            )


def test_unreadable_certificate_authority_is_rejected_at_startup(tmp_path: Path):
    with pytest.raises(ConfigInvalid, match=r"--node-ca-certs .*: No such file"):
        RouterConfig(
            prefills=(PrefillTarget("https://p:1"),),
            decodes=("https://d:1",),
            node_ca_certs=str(tmp_path / "none"),
        )


async def test_node_with_a_different_heartbeat_interval_is_logged_and_used():
    with structlog.testing.capture_logs() as logs:
        decodes = [FakeNode("decode", heartbeat_interval_ms=told) for told in (500.0, 5000.0)]
        async with cluster(decodes=decodes):
            named = [entry for entry in logs if entry["event"] == "node.heartbeat_differs"]
            assert [(e["url"], e["node_ms"], e["router_ms"]) for e in named] == [
                (decodes[1].url, 5000.0, 500.0)
            ]


@pytest.mark.parametrize("secret", ["", "of the cluster"])
async def test_node_receives_neither_client_keys_nor_the_operator_key(secret):
    config = RouterConfig(
        prefills=(),
        decodes=(),
        discovers_announced=True,
        http=HttpOptions(api_keys=("client",)),
        cluster_secret=secret,
    )
    made = Cluster(config)
    async with FakeNode("decode").serving() as node, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(made.run())
        made.apply(Members(members=[Member(node.url, "decode")]))
        await until_async(lambda: node.keys_shown)
        running.cancel()
    operator = operator_key(secret)
    assert node.keys_shown == {f"Bearer {reader_key(operator)}" if secret else ""}
