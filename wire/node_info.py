"""What a node says of itself at `GET /server_info`: enough for a router to use it."""

from typing import Annotated

import msgspec

from tandem.wire.generation import SamplingDefaults
from tandem.wire.messages import NodeLoad

# What cannot be connected to is refused as it is read.
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

ROLES = ("prefill", "decode", "colocated")


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model a node serves.

    Attributes:
        name: As clients name it (`--served-model-name`).
        fingerprint: Equal on two nodes exactly when their KV is interchangeable.
        context_length: Prompt plus generated tokens, at most.
        vocab_size: Ids are below this.
        tokenizer_hash: Of the files at `GET /tokenizer`; empty when the model has no tokenizer.
        default_sampling: Of its generation_config.json.
    """

    name: str
    fingerprint: str
    context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    tokenizer_hash: str = ""
    default_sampling: SamplingDefaults = SamplingDefaults()


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One node. Ports are on the host its URL names.

    Attributes:
        epoch: Of the engine process; changes when it restarts.
        engine_port: Where its engine's inbox listens for edge workers.
        bootstrap_port: Where a prefill listens for grants; None on other roles.
        max_prompt_tokens: The longest prompt its pool can ever hold.
        tp_size: Processes that share its model; 0: an older node, which does not report it.
        heartbeat_interval_ms: Of its links (`--heartbeat-interval-ms`); 0: an older node.
        transports: By which its KV may move, best first; empty on other roles and older nodes.
        is_draining: It takes nothing new; what runs on it goes on.
        zone: Where it stands, as `--zone` said: nodes of one zone are near each other.
        takes_prompts: It takes whole requests (`StartColocated`); false on older decode nodes.
    """

    role: str
    version: str
    epoch: int
    engine_port: Port
    model: ModelInfo
    bootstrap_port: Port | None = None
    is_healthy: bool = True
    max_prompt_tokens: int = 0
    load: NodeLoad = NodeLoad()
    tp_size: int = 0
    transports: list[str] = []
    is_draining: bool = False
    zone: str = ""
    heartbeat_interval_ms: float = 0.0
    takes_prompts: bool = False
