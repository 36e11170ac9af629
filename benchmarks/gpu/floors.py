"""The lower bound of a forward's time on a device, from its memory reads and its matrix products."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """The measured rates of a device.

    Attributes:
        bytes_per_s: Bytes read plus bytes written by a copy.
        flops_per_s: Rate of a large matrix product in the model's dtype.
    """

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    """The work of a model's forward.

    Attributes:
        layer_params: Number of weights in the layers' matrices, which multiply every row of a forward.
        head_params: Number of weights in the output layer, which multiplies only rows that need logits.
            Embeddings are not counted, because they are only looked up.
        attention_width: Query heads times head dim, summed over layers.
        kv_bytes_per_token: Sum over all layers.
    """

    layer_params: int
    head_params: int
    bytes_per_param: int
    attention_width: int
    kv_bytes_per_token: int

    def decode_floor_s(self, device: Device, batch: int, context: int) -> float:
        """Return the time to read the weights and KV of one step."""
        weights = (self.layer_params + self.head_params) * self.bytes_per_param
        return (weights + batch * context * self.kv_bytes_per_token) / device.bytes_per_s

    def prefill_floor_s(self, device: Device, tokens: int) -> float:
        """Return the time of a prompt's matrix products, including causal attention."""
        products = 2 * self.layer_params * tokens + 2 * self.head_params
        # Scores and weighted values are two products, each over the lower triangle with its diagonal.
        attention = 2 * 2 * self.attention_width * tokens * (tokens + 1) // 2
        return (products + attention) / device.flops_per_s


@dataclass(frozen=True)
class Line:
    """One measurement.

    Attributes:
        is_ours: True for the runner that a node selects by default; only these lines count for the result.
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
        """The floor divided by the measured time; at most 1."""
        return self.floor_s / self.took_s


def table(lines: Sequence[Line]) -> str:
    """Return the lines as a Markdown table."""
    rows = [
        "| model | phase | runner | batch | tokens | floor ms | measured ms | tokens/s | ratio |",
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
    """Return the geometric mean of a phase's ratios over lines with `is_ours`; 0 if there are none."""
    ratios = [line.ratio for line in lines if line.phase == phase and line.is_ours]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
