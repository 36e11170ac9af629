"""The engine's configuration. `__main__` reads and validates it, and passes it down whole."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tandem.engine.profile import Simulation
from tandem.settings.flags import Flag

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "fp8_e4m3"]
LoadFormat = Literal["auto", "dummy"]
AttentionName = Literal["auto", "torch", "cpu", "triton"]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an engine, whatever its model. The node sets the fields without a flag.

    Attributes:
        tp_rank: Rank of this process, set by the node that starts it.
        page_size: Tokens per page. Default 16, like vLLM: a page of an 8B model is then 2 MiB, large enough for
            line-rate transfers.
        kv_bytes: Size of the pool in bytes on a CPU over all ranks, if `max_total_tokens` is 0. Default 1 GiB, so
            that two nodes of the built-in model stay below 4 GiB.
        mem_fraction_static: Default 0.85, close to SGLang's, which leaves memory for the activations of an 8k chunk.
        max_running_requests: Default 256, like vLLM.
        local_prefill_tokens: See docs/policies.md.
        is_overlapped: Whether to prepare a forward while the previous one runs; None: only on asynchronous devices.
        has_tiers: Whether the prefix cache has tiers, so that pages need content keys.
        simulation: Settings of a simulated model; None runs the model.
    """

    load_format: Annotated[
        LoadFormat,
        Flag(
            "--load-format",
            group="model",
            help="dummy: seeded random weights, from config.json alone",
        ),
    ] = "auto"
    dtype: Annotated[
        DType,
        Flag(
            "--dtype",
            help="type of the weights; auto: the checkpoint's; on a CPU, the faster of bfloat16 and float32",
            synonyms={"half": "float16"},
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDType,
        Flag("--kv-cache-dtype", help="type of K and V in the pool; auto: the weights'"),
    ] = "auto"
    context_length: Annotated[
        int,
        Flag(
            "--context-length",
            "--max-model-len",
            metavar="TOKENS",
            ge=0,
            help="maximum length of prompt and answer; 0: the model's limit",
        ),
    ] = 0
    random_seed: Annotated[
        int, Flag("--random-seed", "--seed", metavar="N", help="seed of --load-format dummy")
    ] = 0
    trust_remote_code: Annotated[
        bool, Flag("--trust-remote-code", help="run modelling code from the checkpoint")
    ] = False
    device: Annotated[
        str,
        Flag(
            "--device",
            group="engine",
            metavar="NAME",
            help="auto (a GPU if there is one), cpu, cuda:N, or cuda with --tp",
        ),
    ] = "cpu"
    page_size: Annotated[
        int, Flag("--page-size", "--block-size", metavar="TOKENS", ge=1, help="tokens in a KV page")
    ] = 16
    max_total_tokens: Annotated[
        int,
        Flag(
            "--max-total-tokens",
            metavar="TOKENS",
            ge=0,
            help="tokens in the KV pool; 0: 1 GiB on a CPU, --mem-fraction-static on a GPU",
        ),
    ] = 0
    kv_bytes: int = 1 << 30
    mem_fraction_static: Annotated[
        float,
        Flag(
            "--mem-fraction-static",
            "--gpu-memory-utilization",
            metavar="FRACTION",
            help="share of GPU memory for weights and KV",
        ),
    ] = 0.85
    max_running_requests: Annotated[
        int,
        Flag(
            "--max-running-requests",
            "--max-num-seqs",
            metavar="N",
            ge=1,
            help="maximum number of requests in a batch",
        ),
    ] = 256
    max_waiting_requests: Annotated[
        int,
        Flag(
            "--max-waiting-requests",
            metavar="N",
            help="maximum number of queued requests; further requests get 429",
        ),
    ] = 4096
    chunked_prefill_size: Annotated[
        int,
        Flag(
            "--chunked-prefill-size",
            metavar="TOKENS",
            ge=0,
            help="maximum number of prompt tokens in a forward; 0: 512 on a CPU, 8192 on a GPU",
        ),
    ] = 512
    attention_backend: Annotated[
        AttentionName,
        Flag("--attention-backend", help="auto: the fastest that the device supports"),
    ] = "auto"
    is_compiled: Annotated[
        bool, Flag("--enable-torch-compile", help="compile the model, which slows down the start")
    ] = False
    is_eager: Annotated[
        bool,
        Flag(
            "--enforce-eager",
            "--disable-cuda-graph",
            help="disable CUDA graphs and torch.compile",
        ),
    ] = False
    num_threads: Annotated[
        int,
        Flag("--num-threads", metavar="N", help="CPU threads of the node; 0: one for each core"),
    ] = 0
    skips_model_check: Annotated[
        bool,
        Flag(
            "--skip-model-check",
            help="do not compare the model with transformers at the start",
        ),
    ] = False
    is_prefix_cache_enabled: Annotated[
        bool,
        Flag(
            "--disable-prefix-cache",
            "--disable-radix-cache",
            help="do not reuse KV of earlier prompts",
        ),
    ] = True
    tp_size: Annotated[
        int,
        Flag(
            "--tensor-parallel-size",
            "--tp",
            "--tp-size",
            metavar="N",
            ge=1,
            help="number of processes on this host that share the model; must divide the KV heads evenly",
        ),
    ] = 1
    tp_rank: int = 0
    local_prefill_tokens: Annotated[
        int,
        Flag(
            "--local-prefill-tokens",
            metavar="TOKENS",
            ge=0,
            help="on decode: maximum number of tokens of prompts and retracted answers in a step that also "
            "decodes; 0: --chunked-prefill-size",
        ),
    ] = 0
    is_overlapped: bool | None = None
    has_tiers: bool = False
    simulation: Simulation | None = None

    @property
    def is_fused(self) -> bool:
        """Whether to fuse layers of the model, which excludes tensor parallelism and torch.compile."""
        return self.tp_size == 1 and (self.is_eager or not self.is_compiled)


class EngineConfig(EngineOptions, frozen=True, kw_only=True):
    """Configuration of an engine: its options and its model, which is on this machine.

    Attributes:
        model_dir: Transformers directory with config.json and, unless `load_format` is dummy, weights.
    """

    model_dir: Annotated[str, msgspec.Meta(min_length=1)]


def config_with_model(options: EngineOptions, model_dir: Path) -> EngineConfig:
    """Return the config of an engine with these options that runs the model in `model_dir`."""
    return EngineConfig(**msgspec.structs.asdict(options) | {"model_dir": str(model_dir)})


def config_of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """Return the config of one rank, with its rank and device."""
    device = f"cuda:{rank}" if config.device == "cuda" else config.device
    return msgspec.structs.replace(config, tp_rank=rank, device=device)
