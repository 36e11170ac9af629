"""A suite that plays the other half of a hand-off against a node or a transport under test.

It checks what docs/protocol.md promises: good paths, losses, lies, late writes and other versions.

    pytest --pyargs tandem.conformance --prefill-url http://127.0.0.1:7000
    pytest --pyargs tandem.conformance --decode-url http://127.0.0.1:7001
    pytest --pyargs tandem.conformance --transport my_package:MyTransport

What is not given is skipped. Nodes of one rank that offer or take transport `tcp` can be tested. A test is a function of
one player, so that other harnesses may call it, too.
"""
