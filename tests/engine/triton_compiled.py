"""Compiles the Triton kernels as the backend would launch them, without a GPU.

Triton's wheel includes an assembler, so types, shared memory and registers can be checked on any machine.
"""

import inspect
from dataclasses import asdict, dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandem.engine.attention.triton import TileSizes
from tandem.engine.kernels import triton as triton_kernels
from tandem.engine.kernels.operators_triton import norm_warps

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FLOATS = {"scale", "softcap"}
INT32 = {"tiles", "splits", "page_table"}
INT64 = {"write_pages", "write_offsets"}
FLOAT32 = {"partial", "sizes"}


# Argument types, constants and warps of each kernel.
Typed = tuple[dict[str, str], dict[str, int], int]
SAMPLER: dict[str, Typed] = {
    "add_noise": (
        {
            "logits": "*fp32",
            "scores": "*fp32",
            "temperatures": "*fp32",
            "seeds": "*i64",
            "indexes": "*i64",
            "vocab_size": "i32",
        },
        {"num_blocks": 128},
        4,
    ),
    "cutoff_logits": (
        {
            "logits": "*fp32",
            "cutoffs": "*fp32",
            "top_k": "*i64",
            "top_p": "*fp64",
            "vocab_size": "i32",
        },
        {"block": 4096},
        16,
    ),
}


@dataclass(frozen=True)
class Geometry:
    """Geometry of a model, and the kernel paths that it uses."""

    dtype: torch.dtype
    head_dim: int
    group: int
    is_fp8: bool = False
    has_window: bool = False
    has_softcap: bool = False
    has_chunk: bool = False
    has_sinks: bool = False
    num_kv_heads: int = 8
    page_size: int = 16

    def blocks(self, kernel: str) -> TileSizes:
        if kernel == "attend_prompts":
            return TileSizes.of_prompts(self.head_dim, self.dtype, self.group, is_fp8=self.is_fp8)
        return TileSizes.of_decodes(self.head_dim, self.dtype, self.group)

    def constants(self, blocks: TileSizes) -> dict[str, object]:
        return {
            "num_heads": self.group * self.num_kv_heads,
            "block_rows": blocks.rows,
            "block_dim": blocks.dim,
            "block_keys": blocks.keys,
            "block_heads": triton.next_power_of_2(self.num_kv_heads),
            "block_half": triton.next_power_of_2(self.head_dim // 2),
            "block_splits": 32,
            **asdict(self),
        }

    def pointer(self, name: str) -> str:
        if name in INT32:
            return "*i32"
        if name in INT64:
            return "*i64"
        if name in FLOAT32:
            return "*fp32"
        return "*u8" if name == "pool" and self.is_fp8 else f"*{NAMES[self.dtype]}"


POINTERS = {"query", "key", "value", "cos", "sin", "pool", "sinks", "out", *INT32, *INT64, *FLOAT32}


def compile_kernel(name: str, geometry: Geometry, capability: int):
    """Return a kernel as compiled by triton."""
    kernel = getattr(triton_kernels, name)
    blocks = geometry.blocks(name)
    known = geometry.constants(blocks)
    constants, signature = {}, {}
    for argument, parameter in inspect.signature(kernel.fn).parameters.items():
        if parameter.annotation is triton.language.constexpr:
            constants[argument], signature[argument] = known[argument], "constexpr"
        elif argument in POINTERS:
            signature[argument] = geometry.pointer(argument)
        else:
            signature[argument] = "fp32" if argument in FLOATS else "i32"
    # As in the launcher, allocations are aligned and strides of pools are multiples of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(signature)
        if argument in POINTERS
        or argument.startswith(("query_", "out_", "pool_", "key_", "value_"))
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return _compile(source, capability, blocks.num_warps, blocks.num_stages)


def operators(dtype: torch.dtype) -> dict[str, Typed]:
    """Return the operator kernels with the sizes of Llama-3-8B."""
    pointer = f"*{NAMES[dtype]}"
    of_norm = {**dict.fromkeys(("rows", "delta", "weight", "out"), pointer), "eps": "fp32"}
    return {
        "add_norm": (of_norm, {"width": 4096, "has_delta": 1, "block": 4096}, norm_warps(4096)),
        "gated": (dict.fromkeys(("gate_up", "out"), pointer), {"width": 14336, "block": 1024}, 4),
    }


def compile_typed(name: str, typed: Typed, capability: int):
    """Return a kernel as compiled by triton for pointers that are multiples of 16."""
    types, constants, num_warps = typed
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (argument, kind) in enumerate(types.items())
        if kind.startswith("*")
    }
    source = ASTSource(getattr(triton_kernels, name), signature, constants, aligned)
    return _compile(source, capability, num_warps, num_stages=3)


def _compile(source: ASTSource, capability: int, num_warps: int, num_stages: int):
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
