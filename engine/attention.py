"""The seam between transformers' models and paged KV: a function that models call, and backends.

Registered under `NAME` with `AttentionInterface`; with `AttentionMaskInterface` on purpose not:
transformers then makes no mask, nor waits for the GPU to tell whether it needs one. Each attention layer
finds the forward under way by its own `paged`, since not every model passes arguments on; a backend
(`attention_backends.py`) writes the layer's K and V into the pool and attends over the pages. A model whose
attention asks for anything else is refused when it is loaded (`observation.py`), and here at any later
forward: nothing is ignored.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from transformers import AttentionInterface

from tandem.engine.forward import Ints32
from tandem.engine.kv_pool import KVPool
from tandem.wire.errors import ConfigInvalid

NAME = "tandem_paged"

# Arguments that models pass on and that change nothing here: positions are in the rotary embedding
# already, nothing is dropped outside of training, and only logits are asked for.
_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "position_embeddings",
        "use_cache",
        "logits_to_keep",
        "dropout",
        "is_causal",
    }
)


class AttentionNotServed(ConfigInvalid):
    """A model's attention asks for something that paged attention does not compute."""


def not_served(model_type: str, reason: str) -> ConfigInvalid:
    """Return the refusal of a model."""
    return ConfigInvalid(
        f"models of type {model_type!r} are not served: {reason}", topic="models#refused"
    )


@contextmanager
def refusing(hf_config: Any) -> Iterator[None]:
    """Have what refuses a model's attention in the block name the type of the model."""
    try:
        yield
    except KeyError as error:
        if NAME not in str(error):
            raise
        # A model that has classes of its own for each way to attend, and none for ours.
        reason = "its attention does not go through transformers' attention interface"
        raise not_served(hf_config.model_type, reason) from error
    except AttentionNotServed as error:
        raise not_served(hf_config.model_type, error.message) from error


def text_config_of(hf_config: Any) -> Any:
    """Return the config of a model's text part, which is all of most models.

    Raises:
        ConfigInvalid: It has none, or several, or it names no layers, or it reads what another part encodes.
    """
    if getattr(hf_config, "is_encoder_decoder", False):
        raise not_served(hf_config.model_type, "it decodes what an encoder has read")
    try:
        text = hf_config.get_text_config()
    except ValueError as error:
        raise not_served(hf_config.model_type, "it has several text models") from error
    missing = [
        name
        for name in ("num_hidden_layers", "vocab_size")
        if not isinstance(getattr(text, name, None), int)
    ]
    if missing:
        reason = f"its config names no {' and no '.join(missing)}: it has no text model of one stack of layers"
        raise not_served(hf_config.model_type, reason)
    return text


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer turns queries and keys into weights.

    Attributes:
        scale: Of the scores.
        window: Keys a query sees, itself included; all when None.
        softcap: Scores are bounded to ± this by tanh, as in Gemma 2; unbounded when None.
        chunk: A query sees only keys of its own chunk of so many positions, as in Llama 4.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None


@dataclass(slots=True, eq=False)
class LayerInputs:
    """What one layer brings to attention.

    Attributes:
        query: Shape (num_rows, num_heads, key_dim), after rotary embedding; any strides.
        key: Shape (num_rows, num_kv_heads, key_dim); any strides.
        value: Shape (num_rows, num_kv_heads, value_dim); any strides. A view of `key`'s first elements
            where the layer keeps latents.
        sinks: A score for each head that takes weight and adds nothing, as in gpt-oss. Shape (num_heads,).
    """

    index: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scoring: Scoring
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """How a layer of multi-head latent attention is computed on what it keeps: one row a token.

    The row is the compressed K and V, and behind it the part of K that carries the position. A query is
    brought into the space of the compressed K, so that the row serves as the one K and V of all heads.

    Attributes:
        to_key: Expands a compressed row to K. Shape (num_heads, nope_dim, rank).
        to_value: Expands it to V. Shape (num_heads, value_dim, rank).

    Source: DeepSeek-V2, 2024, section 2.1.
    """

    to_key: torch.Tensor
    to_value: torch.Tensor

    def inputs(
        self, index: int, query: torch.Tensor, kept: "Kept", scoring: Scoring
    ) -> LayerInputs:
        """Return what the layer brings, for a query (1, num_heads, num_rows, nope_dim + rope_dim)."""
        _, nope_dim, rank = self.to_key.shape
        nope, rope = query[0][..., :nope_dim], query[0][..., nope_dim:]
        absorbed = torch.cat([nope @ self.to_key, rope], dim=-1)  # (heads, rows, rank + rope)
        row = torch.cat([part[0].transpose(0, 1) for part in kept], dim=-1)  # (rows, 1, ...)
        return LayerInputs(index, absorbed.transpose(0, 1), row, row[..., :rank], scoring)

    def outputs(self, attended: torch.Tensor) -> torch.Tensor:
        """Expand what was attended. Shape (num_rows, num_heads, rank) → (..., value_dim)."""
        expanded = attended.transpose(0, 1) @ self.to_value.transpose(1, 2)
        return expanded.transpose(0, 1)


Kept = tuple[torch.Tensor, torch.Tensor]
"""What a layer of a model gave to its cache: two tensors, shape (1, num_heads, num_rows, dim)."""


class PagedPast:
    """What models take for their cache of earlier tokens: it answers where each row stands.

    Models that keep anything but K and V ask it for what it does not have, and are refused for that.

    Args:
        layers: Whose `kept` is wanted; None: all of them.
    """

    def __init__(self, positions: torch.Tensor, layers: Container[int] | None = None) -> None:
        self._positions = positions
        self._layers = layers
        self.kept: dict[int, Kept] = {}
        self.is_asked = False

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Kept:
        """Note what a layer would have cached; return it alone: attention finds the rest in pages."""
        if self._layers is None or layer_idx in self._layers:
            self.kept[layer_idx] = key, value
        return key, value

    def get_seq_length(self, _layer_idx: int = 0) -> torch.Tensor:
        """Return how many tokens came before: row by row, so that adding row numbers gives positions."""
        self.is_asked = True
        rows = torch.arange(len(self._positions), device=self._positions.device)
        return self._positions - rows

    def __getattr__(self, name: str) -> Any:
        # AttributeError: models also look whether a cache has something.
        raise AttributeError(
            f"the model asks its cache for {name!r}, which is not K and V of tokens"
        )


@dataclass(slots=True, eq=False)
class PagedBatch:
    """Where the rows of one forward read and write KV. Rows are in the order of `ForwardInputs`.

    Attributes:
        page_table: Shape (num_seqs, max_pages), int32, on the pool's device.
        kv_lens: Shape (num_seqs,), int32, on the pool's device.
        write_pages, write_offsets: Where each row's KV goes. Shape (num_rows,), int64, likewise.
        host_page_table, host_kv_lens, host_query_starts: The same numbers on the host.
        wrote: Called with each layer's number when its K and V are written, or, on a device that runs
            beside the host, queued to be.
        is_recorded: This forward is recorded into a graph: the tensors stay, what is in them changes.
        scratch: What the backend keeps between the layers of this forward.
    """

    backend: "AttentionBackend"
    pool: KVPool
    num_decodes: int
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    host_page_table: Ints32
    host_kv_lens: Ints32
    host_query_starts: Ints32
    wrote: Callable[[int], None] | None = None
    is_recorded: bool = False
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.pool.page_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the pool."""
        return self.pool.dtype

    def once(self, key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what `make` returned for this key first: of layers that are alike, one makes it."""
        found: torch.Tensor | None = self.scratch.get(key)
        if found is None:
            self.scratch[key] = found = make()
        return found

    def write(self, layer: LayerInputs) -> None:
        """Put K and V of every row into the pool, in the pool's type."""
        pages = self.pool.layers[layer.index]
        if pages.is_shared:  # the layer that keeps them has written them
            return
        is_eight_bit = self.dtype.itemsize == 1
        for plane, rows in ((pages.key, layer.key), (pages.value, layer.value)):
            if not plane.shape[-1]:
                continue
            # Not every device can index eight-bit floats; all can index bytes.
            target = plane.view(torch.uint8) if is_eight_bit else plane
            narrowed = self._to_eight_bits(rows) if is_eight_bit else rows.to(self.dtype)
            target[self.write_pages, :, self.write_offsets] = narrowed

    def _to_eight_bits(self, rows: torch.Tensor) -> torch.Tensor:
        # e4m3 has no infinity: beyond its range torch would make NaN of what is merely large.
        largest = torch.finfo(self.dtype).max
        return rows.clamp(-largest, largest).to(self.dtype).view(torch.uint8)


class AttentionBackend(Protocol):
    """Attends over pages."""

    name: str

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """Write K and V of this forward's rows, then attend with each row over its sequence.

        Returns:
            Shape (num_rows, num_heads, value_dim), in the query's type.
        """


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose `attend`, for decoding rows, can be recorded into a CUDA graph."""

    def prepare(self, batch: PagedBatch) -> None:
        """Do what a recorded forward cannot: what depends on numbers that the host knows.

        Called before each replay, once the batch's host numbers are those of the forward to come.
        """


class PagedModel:
    """A transformers model that attends through pages.

    Args:
        module: The causal language model. Its attention modules are given this model as `paged`.
        latents: For layers that keep latents.
        chunks: Positions in a chunk, for layers that attend within chunks.
        windows: For layers that do not bring their window themselves.
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
        self.chunks, self.windows = chunks or {}, windows or {}
        self._latents = latents or {}
        self._forward: _Forward | None = None
        for each in module.modules():
            if isinstance(getattr(each, "layer_idx", None), int):
                each.paged = self  # type: ignore[assignment]

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
            attend: Takes what a layer brings; returns shape (num_rows, num_heads, value_dim).
            past: Of these positions; None makes one that keeps what latents need.

        Returns:
            Shape (num_logits, vocab_size).
        """
        past = past or PagedPast(positions, self._latents)
        self._forward = _Forward(attend, past, wrote)
        try:
            output = self.module(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                past_key_values=past if self.has_past else None,
                use_cache=False,
                logits_to_keep=logit_rows,
            )
        finally:
            self._forward = None  # it holds the pool, and K and V of the last layers
        logits: torch.Tensor = output.logits[0]
        return logits

    def attend(
        self,
        index: int,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scoring: Scoring,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend for one layer of the forward under way: `tensors` as `paged_attention` has them.

        Returns:
            Shape (num_rows, num_heads, value_dim).
        """
        forward = self._forward
        assert forward is not None, "no forward is under way"
        latents = self._latents.get(index)
        if latents is not None:
            layer = latents.inputs(index, tensors[0], forward.past.kept.pop(index), scoring)
            attended = latents.outputs(forward.attend(layer))
        else:
            query, key, value = (part[0].transpose(0, 1) for part in tensors)
            attended = forward.attend(LayerInputs(index, query, key, value, scoring, sinks))
        if forward.wrote is not None:
            forward.wrote(index)
        return attended


class _Forward(NamedTuple):
    """The forward under way; see `PagedModel.logits`."""

    attend: Callable[[LayerInputs], torch.Tensor]
    past: PagedPast
    wrote: Callable[[int], None] | None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for one layer of a transformers model.

    Args:
        module: The attention module; `layer_idx` names the layer, `paged` has the forward.
        query, key, value: Shape (1, num_heads, num_rows, dim); after rotary embedding.
        s_aux: As `LayerInputs.sinks`.

    Returns:
        The output, shape (1, num_rows, num_heads, value_dim), and no weights.

    Raises:
        AttentionNotServed: The layer asks for what is not computed here.
    """
    _check_understood(module, attention_mask, others)
    paged: PagedModel | None = getattr(module, "paged", None)
    if paged is None:
        raise AttentionNotServed("its attention does not know the number of its layer")
    index = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or paged.windows.get(index)
    scoring = Scoring(scale, window, softcap or None, paged.chunks.get(index))
    return paged.attend(index, (query, key, value), scoring, s_aux).unsqueeze(0), None


def _check_understood(
    module: torch.nn.Module, attention_mask: object, others: Mapping[str, Any]
) -> None:
    if attention_mask is not None:
        raise AttentionNotServed("it makes an attention mask of its own")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise AttentionNotServed("its attention is not causal: it looks at later tokens")
    for name, given in others.items():
        if given is not None and given is not False and name not in _HARMLESS:
            raise AttentionNotServed(f"its attention takes {name!r}, which is not understood here")


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the values on the device; on a CPU the memory is shared.

    To a GPU the copy is queued behind what runs, from pinned memory, so that nothing waits for it.
    """
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def register(*, is_compiled: bool = False) -> str:
    """Make the attention known to transformers; return the name to load models with.

    Args:
        is_compiled: The model around it is going to be: the compiler is then to leave attention as it is,
            for what a backend does on the host is new with every forward.
    """
    function = paged_attention
    if is_compiled:
        function = torch.compiler.disable(paged_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(NAME, function)
    return NAME
