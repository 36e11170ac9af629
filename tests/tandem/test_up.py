from tandem.up import build_parser, free_ports, members


def cluster(*argv: str, num_cores: int = 2):
    args, extra = build_parser().parse_known_args(argv)
    return members(args, extra, list(range(9000, 9100)), num_cores)


def test_a_pair_and_a_router_are_what_one_gets():
    prefill, decode, router = cluster()
    assert prefill.argv[:5] == ["prefill", "--port", "9000", "--bootstrap-port", "9001"]
    assert decode.argv[:3] == ["decode", "--port", "9002"]
    assert router.argv[:5] == ["lb", "--prefill", "http://127.0.0.1:9000", "9001", "--decode"]


def test_more_nodes_share_the_cores_and_none_shares_a_port():
    found = cluster("--prefills", "2", "--decodes", "2", num_cores=8)
    assert [member.name for member in found] == [
        *("prefill-0", "prefill-1", "decode-0", "decode-1", "router")
    ]
    assert all(m.argv[m.argv.index("--num-threads") + 1] == "2" for m in found[:4])
    ports = [m.argv[m.argv.index("--port") + 1] for m in found]
    assert len(set(ports)) == 5


def test_a_flag_of_nodes_goes_to_every_node_and_not_to_the_router():
    prefill, decode, router = cluster("--dtype", "float32", "--model", "/m")
    for node in (prefill, decode):
        assert node.argv[-4:] == ["--dtype", "float32", "--model", "/m"]
    assert "--dtype" not in router.argv


def test_free_ports_are_distinct():
    assert len(set(free_ports(20))) == 20
