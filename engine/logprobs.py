"""Log-probabilities of the model's own distribution, before any parameter of a request changes it."""

from dataclasses import dataclass

import torch

from tandem.wire.generation import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of some rows, still on the device.

    Attributes:
        chosen: Of the token that stands there. Shape (n,).
        top_values, top_ids: The likeliest, in falling order. Shape (n, num_top).
    """

    chosen: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor

    def read(self, num_top: list[int]) -> list[TokenLogprobs]:
        """Wait for the device; return one entry a row, with as many of the likeliest as it wants."""
        values, ids = self.top_values.tolist(), self.top_ids.tolist()
        return [
            TokenLogprobs(
                logprob=logprob,
                top=list(zip(ids[row][:count], values[row][:count], strict=True)),
            )
            for row, (logprob, count) in enumerate(zip(self.chosen.tolist(), num_top, strict=True))
        ]


@torch.inference_mode()
def logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> LogprobTensors:
    """Return the log-probabilities of `tokens` and of the `num_top` likeliest.

    Args:
        logits: Shape (n, vocab_size).
        tokens: Shape (n,).
    """
    scores = logits.float().log_softmax(dim=-1)
    top = scores.topk(min(num_top, scores.shape[1]), dim=-1)
    chosen = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return LogprobTensors(chosen, top.values, top.indices)
