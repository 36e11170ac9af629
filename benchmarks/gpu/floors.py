"""The least time that a forward can take on a device: what must be read, what must be multiplied."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What a device was measured to do.

    Attributes:
        bytes_per_s: Read plus written by a copy.
        flops_per_s: Of a large matrix product in the model's type.
    """

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    """What a model makes a device do.

    Attributes:
        layer_params: Weights that each row of a forward is multiplied with.
        head_params: Those of the output layer, multiplied with rows whose logits are wanted. The
            embedding's are looked up, and cost nothing.
        attention_width: Query heads times head dim, summed over layers.
        kv_bytes_per_token: Over all layers.
    """

    layer_params: int
    head_params: int
    bytes_per_param: int
    attention_width: int
    kv_bytes_per_token: int

    def decode_floor_s(self, device: Device, batch: int, context: int) -> float:
        """Return the time in which one step's weights and KV are read."""
        weights = (self.layer_params + self.head_params) * self.bytes_per_param
        return (weights + batch * context * self.kv_bytes_per_token) / device.bytes_per_s

    def prefill_floor_s(self, device: Device, tokens: int) -> float:
        """Return the time in which a prompt's products are made, those of causal attention included."""
        products = 2 * self.layer_params * tokens + 2 * self.head_params
        # Scores and weighted values: two products, over half the square and its diagonal.
        attention = 2 * 2 * self.attention_width * tokens * (tokens + 1) // 2
        return (products + attention) / device.flops_per_s


@dataclass(frozen=True)
class Line:
    """One measurement.

    Attributes:
        is_ours: By the runner that a node takes by itself; such lines make the result.
    """

    model: str
    phase: str
    runner: str
    batch: int
    tokens: int
    floor_s: float
    took_s: float
    is_ours: bool = False

    @property
    def ratio(self) -> float:
        """Share of the floor's rate that was reached."""
        return self.floor_s / self.took_s


def table(lines: Sequence[Line]) -> str:
    """Return the lines as a Markdown table."""
    rows = [
        "| model | phase | runner | batch | tokens | floor ms | took ms | tokens/s | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        made = line.batch if line.phase == "decode" else line.tokens
        rows.append(
            f"| {line.model} | {line.phase} | {line.runner} | {line.batch} | {line.tokens} | "
            f"{line.floor_s * 1e3:.2f} | {line.took_s * 1e3:.2f} | {made / line.took_s:.0f} | "
            f"{line.ratio:.2f} |"
        )
    return "\n".join(rows)


def mean_ratio(phase: str, lines: Sequence[Line]) -> float:
    """Return the geometric mean of our ratios in a phase; 0 when there are none."""
    ratios = [line.ratio for line in lines if line.phase == phase and line.is_ours]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
