import pytest

from tandem.engine.config import EngineConfig
from tandem.node.config import NodeConfig
from tandem.node.model_engine import build_model
from tandem.wire.channel import Waker
from tandem.wire.errors import ConfigInvalid


def test_the_device_is_taken_before_the_model_is_read():
    """Here it is not there; where it is, all of the model goes to it."""
    engine = EngineConfig(model_dir="/there is no model", device="cuda:99")
    config = NodeConfig(role="colocated", served_model_name="m", engine=engine)
    waker = Waker()
    with pytest.raises(ConfigInvalid, match="--device cuda:99: torch sees"):
        build_model(config, lambda _plan: None, waker, None)
    waker.close()
