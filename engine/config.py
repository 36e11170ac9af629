"""What an engine is told before it starts. Read and checked in `__main__`, passed down whole."""

from typing import Literal

import msgspec

from tandem.engine.profile import Simulation

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "fp8_e4m3"]
LoadFormat = Literal["auto", "dummy"]
AttentionName = Literal["auto", "torch", "cpu", "triton", "flashinfer"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        model_dir: A transformers directory with config.json and, unless `load_format` is dummy,
            safetensors.
        dtype: Of weights; `auto` takes what the checkpoint says.
        kv_cache_dtype: Of K and V in the pool; `auto` is the weights'.
        attention_backend: `auto` takes the fastest that runs on the device.
        is_eager: Record no CUDA graphs and compile nothing.
        is_compiled: Compile the model with torch.compile.
        tp_size: Processes, and devices, that share the model.
        tp_rank: Which of them this is; a node sets it for the processes it starts.
        page_size: Tokens in a page. 16: vLLM's default; a page of an 8B model is then 2 MiB, large
            enough to move at line rate.
        max_total_tokens: Tokens the pool holds; 0 sizes it by `kv_bytes` (CPU) or
            `mem_fraction_static` (GPU).
        kv_bytes: Size of the pool on the CPU, of all ranks together, when `max_total_tokens` is 0.
            1 GiB: two nodes of the embedded model stay below 4 GiB.
        mem_fraction_static: Share of the GPU's memory for weights and pool. 0.85: SGLang's default
            is close, and leaves activations of an 8k chunk.
        max_running_requests: Requests in one decode batch. 256: vLLM's default.
        max_waiting_requests: Beyond this a request is refused with 429.
        chunked_prefill_size: Prompt tokens in one forward. 512 on the CPU, where a chunk of the
            embedded model is then about half a second; 8192 is usual on GPUs.
        local_prefill_tokens: Of new prompts' tokens, those in one forward that also has answers in it;
            0: as many as `chunked_prefill_size`. A decode node's: see docs/conditional.md.
        context_length: 0 takes the model's own.
        is_overlapped: Whether a forward is prepared while the one before runs; None: on devices that
            compute beside the host.
        num_threads: Of torch on the CPU; 0 leaves torch's own choice.
        skips_model_check: Do not compare the model with plain transformers at the start.
        has_tiers: Whether tiers are behind the prefix cache: its pages then have keys of their content.
        simulation: What stands in for the model; None computes with it.
    """

    model_dir: str
    dtype: DType = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    attention_backend: AttentionName = "auto"
    is_eager: bool = False
    is_compiled: bool = False
    tp_size: int = 1
    tp_rank: int = 0
    load_format: LoadFormat = "auto"
    device: str = "cpu"
    trust_remote_code: bool = False
    random_seed: int = 0
    page_size: int = 16
    max_total_tokens: int = 0
    kv_bytes: int = 1 << 30
    mem_fraction_static: float = 0.85
    max_running_requests: int = 256
    max_waiting_requests: int = 4096
    chunked_prefill_size: int = 512
    local_prefill_tokens: int = 0
    context_length: int = 0
    is_overlapped: bool | None = None
    num_threads: int = 0
    skips_model_check: bool = False
    is_prefix_cache_enabled: bool = True
    has_tiers: bool = False
    simulation: Simulation | None = None


def config_of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """Return the config of one rank: its number, and the device that is its own."""
    device = f"cuda:{rank}" if config.device == "cuda" else config.device
    return msgspec.structs.replace(config, tp_rank=rank, device=device)
