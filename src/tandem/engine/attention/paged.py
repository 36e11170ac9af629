"""The interface between transformers' models and paged KV: an attention function and its backends.

The function is registered under `NAME` with `AttentionInterface`, but deliberately not with
`AttentionMaskInterface`: transformers then builds no mask and does not wait for the GPU to decide whether it
needs one. Each attention module finds the current forward through its `paged` attribute, because some models do
not pass arguments through. A backend (`backends.py`) writes the layer's K and V into the pool and computes
attention over the pages. A model that needs a different kind of attention is rejected when it is loaded
(`model/observation.py`) and in any later forward (here): no argument is silently ignored.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from transformers import AttentionInterface

from tandem.engine.kernels.operators import TorchOperators
from tandem.engine.pages.pool import KVPool
from tandem.engine.scheduling.forward import Ints32
from tandem.wire.errors import ConfigInvalid

NAME = "tandem_paged"

# Arguments that have no effect here: rotary embedding has already applied positions, dropout applies only in
# training, and only logits are computed.
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
    """A model needs a kind of attention that paged attention does not support."""


def not_served(model_type: str, reason: str) -> ConfigInvalid:
    """Return the error that rejects a model."""
    return ConfigInvalid(
        f"models of type {model_type!r} are not supported: {reason}", topic="docs/models.md#refused"
    )


@contextmanager
def refusing(hf_config: Any) -> Iterator[None]:
    """Add the model's type to errors raised in the block that reject its attention."""
    try:
        yield
    except KeyError as error:
        if NAME not in str(error):
            raise
        # The model selects an attention class by name and has no class for our name.
        reason = "its attention does not go through transformers' attention interface"
        raise not_served(hf_config.model_type, reason) from error
    except AttentionNotServed as error:
        raise not_served(hf_config.model_type, error.message) from error


def text_config_of(hf_config: Any) -> Any:
    """Return the config of a model's text part; for most models, the whole config.

    Raises:
        ConfigInvalid: The model has an encoder, or its config does not describe exactly one text model.
    """
    has_both = all(hasattr(hf_config, f"{part}_layers") for part in ("encoder", "decoder"))
    if has_both or getattr(hf_config, "is_encoder_decoder", False):
        raise not_served(hf_config.model_type, "it is an encoder-decoder model")
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
        reason = f"its config has no {' and no '.join(missing)}, so it is not a single stack of text layers"
        raise not_served(hf_config.model_type, reason)
    return text


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer computes attention weights from queries and keys.

    Attributes:
        scale: Factor of the scores.
        window: Number of keys visible to a query, its own included; None: all.
        softcap: Bound of the absolute scores, applied by tanh, as in Gemma 2; None: unbounded.
        chunk: Size in positions of the chunks that attention is limited to, as in Llama 4; None: unlimited.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None


@dataclass(slots=True, eq=False)
class LayerInputs:
    """The inputs of one layer's attention.

    Attributes:
        query: Shape (num_rows, num_heads, key_dim), after rotary embedding; any strides.
        key: Shape (num_rows, num_kv_heads, key_dim); any strides.
        value: Shape (num_rows, num_kv_heads, value_dim); any strides. If the layer stores latents, a view of
            the first elements of `key`.
        sinks: One score per head that takes weight but has no value, as in gpt-oss. Shape (num_heads,).
        rotary: Cosines and sines if query and key are not yet rotated; the backend may rotate them, in place,
            when it writes K and V. Contiguous. Shape (num_rows, key_dim) each.
    """

    index: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scoring: Scoring
    sinks: torch.Tensor | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    def rotate(self) -> None:
        """Rotate query and key unless they are rotated already."""
        if self.rotary is not None:
            for heads in (self.query, self.key):
                TorchOperators().rotate(heads, *self.rotary)
            self.rotary = None


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """Weights that let multi-head latent attention run on the stored latents, one row per token.

    A row consists of the compressed K and V and the rotary part of K. Queries are projected into the space of the
    compressed K, so that the row serves as K and V of all heads.

    Attributes:
        to_key: Expands a compressed row to K. Shape (num_heads, nope_dim, rank).
        to_value: Expands a compressed row to V. Shape (num_heads, value_dim, rank).

    Source: DeepSeek-V2, 2024, section 2.1.
    """

    to_key: torch.Tensor
    to_value: torch.Tensor

    def inputs(
        self, index: int, query: torch.Tensor, kept: "Kept", scoring: Scoring
    ) -> LayerInputs:
        """Return the layer's inputs for a query of shape (1, num_heads, num_rows, nope_dim + rope_dim)."""
        _, nope_dim, rank = self.to_key.shape
        nope, rope = query[0][..., :nope_dim], query[0][..., nope_dim:]
        absorbed = torch.cat([nope @ self.to_key, rope], dim=-1)  # (heads, rows, rank + rope)
        row = torch.cat([part[0].transpose(0, 1) for part in kept], dim=-1)  # (rows, 1, ...)
        return LayerInputs(index, absorbed.transpose(0, 1), row, row[..., :rank], scoring)

    def outputs(self, attended: torch.Tensor) -> torch.Tensor:
        """Expand the attention's output. Shape (num_rows, num_heads, rank) → (..., value_dim)."""
        expanded = attended.transpose(0, 1) @ self.to_value.transpose(1, 2)
        return expanded.transpose(0, 1)


Kept = tuple[torch.Tensor, torch.Tensor]
"""The two tensors that a layer passed to its cache, shape (1, num_heads, num_rows, dim) each."""


class PagedPast:
    """Replacement of a model's KV cache that only reports positions and records new K and V.

    A model that caches anything else uses an attribute that this class lacks, and is rejected.

    Args:
        layers: Layers to record in `kept`; None: all.
    """

    def __init__(self, positions: torch.Tensor, layers: Container[int] | None = None) -> None:
        self._positions = positions
        self._layers = layers
        self.kept: dict[int, Kept] = {}
        self.is_length_queried = False

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Kept:
        """Record a layer's new K and V and return them alone, because attention reads earlier tokens from pages."""
        if self._layers is None or layer_idx in self._layers:
            self.kept[layer_idx] = key, value
        return key, value

    def get_seq_length(self, _layer_idx: int = 0) -> torch.Tensor:
        """Return one length per row, to which models add the row number to get the row's position."""
        self.is_length_queried = True
        rows = torch.arange(len(self._positions), device=self._positions.device)
        return self._positions - rows

    def __getattr__(self, name: str) -> Any:
        # Models also test whether a cache has an attribute, so this must be an AttributeError.
        raise AttributeError(
            f"the model uses {name!r} of its cache, and only K and V of tokens are supported"
        )


@dataclass(slots=True, eq=False)
class PagedBatch:
    """Where the rows of one forward read and write KV. Rows are in the order of `ForwardInputs`.

    Attributes:
        page_table: Shape (num_seqs, max_pages), int32, on the pool's device.
        kv_lens: Shape (num_seqs,), int32, on the pool's device.
        write_pages, write_offsets: Destination of each row's KV. Shape (num_rows,), int64, same device.
        host_page_table, host_kv_lens, host_query_starts: This forward's values in host memory.
        on_layer_written: Called with each layer's number once its K and V are written or, on an asynchronous
            device, queued.
        scratch: Storage for the backend, shared by the layers of this forward.
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
    on_layer_written: Callable[[int], None] | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.pool.page_size

    @property
    def dtype(self) -> torch.dtype:
        """Type of K and V in the pool."""
        return self.pool.dtype

    def cached(self, key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result cached for `key`, calling `make` the first time. Similar layers share it."""
        found: torch.Tensor | None = self.scratch.get(key)
        if found is None:
            self.scratch[key] = found = make()
        return found

    def write(self, layer: LayerInputs) -> None:
        """Write K and V of every row into the pool, in the pool's type."""
        layer.rotate()
        pages = self.pool.layers[layer.index]
        if pages.is_shared:  # the source layer has already written them
            return
        is_eight_bit = self.dtype.itemsize == 1
        for plane, rows in ((pages.key, layer.key), (pages.value, layer.value)):
            if not plane.shape[-1]:
                continue
            # Some devices cannot index eight-bit floats, but all can index bytes.
            target = plane.view(torch.uint8) if is_eight_bit else plane
            narrowed = self._to_eight_bits(rows) if is_eight_bit else rows.to(self.dtype)
            target[self.write_pages, :, self.write_offsets] = narrowed

    def _to_eight_bits(self, rows: torch.Tensor) -> torch.Tensor:
        # e4m3 has no infinity, so torch would convert values beyond its range to NaN.
        largest = torch.finfo(self.dtype).max
        return rows.clamp(-largest, largest).to(self.dtype).view(torch.uint8)


class AttentionBackend(Protocol):
    """Implementation of attention over pages."""

    name: str

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """Write K and V of this forward's rows, then compute attention of each row over its sequence.

        Returns:
            Shape (num_rows, num_heads, value_dim), in the query's type.
        """


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose `attend` can be recorded into a CUDA graph for decoding rows."""

    def prepare(self, batch: PagedBatch) -> None:
        """Do the host work that a graph cannot record.

        Called before each replay, after the batch's host arrays are set.
        """


class DirectForward(Protocol):
    """A specialized forward for one family of models."""

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        attend: Callable[[LayerInputs], torch.Tensor],
    ) -> torch.Tensor:
        """Compute what `PagedModel.logits` returns."""


class PagedModel:
    """A transformers model with paged attention.

    Args:
        module: The causal language model. Its attention modules refer to this object as `paged`.
        latents: Latents of layers that store them, by layer number.
        chunks: Chunk size of layers with chunked attention, by layer number.
        windows: Window of layers that do not pass it as an argument, by layer number.
        has_past: Whether the model gets a `PagedPast` as its cache; otherwise it gets None.

    Attributes:
        direct: Specialized forward that replaces the modelling code; None if there is none for this model.
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
        self.direct: DirectForward | None = None
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
        on_layer_written: Callable[[int], None] | None = None,
        past: PagedPast | None = None,
    ) -> torch.Tensor:
        """Run the model over rows of any number of sequences.

        Args:
            token_ids, positions: Shape (num_rows,), int64.
            logit_rows: Shape (num_logits,), int64.
            attend: Computes a layer's attention. Returns shape (num_rows, num_heads, value_dim).
            on_layer_written: Called with each layer's number after its attention was computed or queued.
            past: Cache replacement for these positions; None creates one that records latent layers.

        Returns:
            Shape (num_logits, vocab_size).
        """
        if self.direct is not None:

            def attend_layer(layer: LayerInputs) -> torch.Tensor:
                attended = attend(layer)
                if on_layer_written is not None:
                    on_layer_written(layer.index)
                return attended

            return self.direct.logits(token_ids, positions, logit_rows, attend_layer)
        past = past or PagedPast(positions, self._latents)
        self._forward = _Forward(attend, past, on_layer_written)
        try:
            output = self.module(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                past_key_values=past if self.has_past else None,
                use_cache=False,
                logits_to_keep=logit_rows,
            )
        finally:
            self._forward = None  # it refers to the pool, and to K and V of the last layers
        logits: torch.Tensor = output.logits[0]
        return logits

    def attend(
        self,
        index: int,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scoring: Scoring,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention for one layer of the current forward.

        Args:
            tensors: Query, key and value of `paged_attention`.

        Returns:
            Shape (num_rows, num_heads, value_dim).
        """
        forward = self._forward
        assert forward is not None, "no forward is running"
        latents = self._latents.get(index)
        if latents is not None:
            layer = latents.inputs(index, tensors[0], forward.past.kept.pop(index), scoring)
            attended = latents.outputs(forward.attend(layer))
        else:
            query, key, value = (part[0].transpose(0, 1) for part in tensors)
            attended = forward.attend(LayerInputs(index, query, key, value, scoring, sinks))
        if forward.on_layer_written is not None:
            forward.on_layer_written(index)
        return attended


class _Forward(NamedTuple):
    """The current forward; see `PagedModel.logits`."""

    attend: Callable[[LayerInputs], torch.Tensor]
    past: PagedPast
    on_layer_written: Callable[[int], None] | None


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
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for one layer of a transformers model.

    Args:
        module: The attention module; `layer_idx` is the layer's number, `paged` its `PagedModel`.
        query, key, value: After rotary embedding. Shape (1, num_heads, num_rows, dim).
        s_aux: See `LayerInputs.sinks`.

    Returns:
        The output, shape (1, num_rows, num_heads, value_dim), and None for the weights.

    Raises:
        AttentionNotServed: The layer needs an unsupported kind of attention.
    """
    _check_supported(module, attention_mask, options)
    paged: PagedModel | None = getattr(module, "paged", None)
    if paged is None:
        raise AttentionNotServed("its attention modules have no layer number")
    index = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or paged.windows.get(index)
    scoring = Scoring(scale, window, softcap or None, paged.chunks.get(index))
    return paged.attend(index, (query, key, value), scoring, s_aux).unsqueeze(0), None


def _check_supported(
    module: torch.nn.Module, attention_mask: object, options: Mapping[str, Any]
) -> None:
    if attention_mask is not None:
        raise AttentionNotServed("it makes its own attention mask")
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise AttentionNotServed("its attention is not causal")
    for name, value in options.items():
        if value is not None and value is not False and name not in _HARMLESS:
            raise AttentionNotServed(f"its attention uses the unsupported argument {name!r}")


def register(*, is_compiled: bool = False) -> str:
    """Register the attention function with transformers; return the name to load models with.

    Args:
        is_compiled: Whether torch.compile will compile the model. It must skip attention, because the host work
            of a backend differs in every forward.
    """
    function = paged_attention
    if is_compiled:
        function = torch.compiler.disable(paged_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(NAME, function)
    return NAME
