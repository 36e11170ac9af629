"""A transformers model that attends through pages: what a forward gives it, and what it returns."""

from collections.abc import Callable, Mapping

import torch

from tandem.engine.attention import Attending, Latents, LayerInputs, PagedPast


class PagedModel:
    """A model loaded with our attention; see `attention.py`.

    Args:
        module: The causal language model. Its attention modules are given an attribute `attending`.
        latents, chunks, windows: See `Attending`.
        has_past: Whether the model is given `PagedPast` for its cache, or nothing.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        latents: Mapping[int, Latents] | None = None,
        chunks: Mapping[int, int] | None = None,
        windows: Mapping[int, int] | None = None,
        has_past: bool = True,
    ) -> None:
        self.module = module
        self.has_past = has_past
        self._attending = Attending(latents or {}, chunks or {}, windows or {})
        for each in module.modules():
            if isinstance(getattr(each, "layer_idx", None), int):
                each.attending = self._attending  # type: ignore[assignment]

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        attend: Callable[[LayerInputs], torch.Tensor],
        *,
        wrote: Callable[[int], None] | None = None,
        past: PagedPast | None = None,
    ) -> torch.Tensor:
        """Run the model over rows of any number of sequences.

        Args:
            token_ids, positions: Shape (num_rows,), int64.
            logit_rows: Shape (num_logits,), int64.
            attend, wrote: See `Attending`.
            past: Of these positions; None makes one that keeps what latents need.

        Returns:
            Shape (num_logits, vocab_size).
        """
        attending = self._attending
        past = past or PagedPast(positions, attending.latents)
        attending.attend, attending.wrote, attending.past = attend, wrote, past
        try:
            output = self.module(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                past_key_values=past if self.has_past else None,
                use_cache=False,
                logits_to_keep=logit_rows,
            )
        finally:
            # They hold the pool, and K and V of the last layers.
            attending.attend = attending.wrote = attending.past = None
        logits: torch.Tensor = output.logits[0]
        return logits
