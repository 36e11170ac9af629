"""Settings of the hand-off that depend on vLLM's own."""

import pytest

from tandem.engine.config import EngineConfig
from tandem.node.config import NodeConfig
from tandem.vllm.caches import Heads
from tests.with_vllm.models import tiny

# vLLM's dependencies raise deprecation warnings on import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NGRAM = '{"method": "ngram", "num_speculative_tokens": 2}'


@pytest.mark.parametrize(
    ("flags", "granularity"), [((), "layer"), (("--speculative-config", NGRAM), "chunk")]
)
def test_layers_are_not_pushed_while_a_drafter_may_write_them(
    tmp_path, monkeypatch, flags, granularity
):
    from tandem.vllm import connector
    from tandem.vllm.node.arguments import parse_arguments, vllm_config_of

    monkeypatch.setattr(connector, "layout_facts", lambda *_: {})
    monkeypatch.setattr(connector, "heads_of", lambda *_: Heads())
    words = ["--skip-tokenizer-init", "--max-model-len", "512", *flags]
    engine = EngineConfig(model_dir=str(tiny("full attention", tmp_path)))
    config = NodeConfig(role="prefill", engine=engine, vllm_args=words)
    vllm_config = vllm_config_of(config, parse_arguments(config))
    found = connector.hand_off_config(vllm_config, None)
    assert found.push_granularity == granularity
