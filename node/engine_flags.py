"""The flags that make an `EngineConfig`: which model, how large its pool and batches, what computes them.

Those that also say whether a model fits a machine are functions of their own: `tandem doctor` takes them.
"""

import argparse
from pathlib import Path

from tandem.engine.config import EngineConfig
from tandem.engine.profile import Profile, Simulation, read_profile
from tandem.wire.errors import ConfigInvalid


def add_model_flags(group: argparse._ArgumentGroup) -> None:
    """Add which model it is and how it is loaded."""
    add = group.add_argument
    add(
        "--model",
        "--model-path",
        default=None,
        metavar="PATH",
        help="a transformers directory or a GGUF file; nothing for the embedded SmolLM2-135M-Instruct",
    )
    add("--served-model-name", default=None, metavar="NAME", help="how clients name the model")
    add(
        "--load-format",
        choices=["auto", "dummy"],
        default="auto",
        help="dummy: seeded random weights from config.json alone",
    )
    add_dtype_flags(group)
    add("--context-length", "--max-model-len", type=int, default=0, help="0: the model's own")
    add("--random-seed", "--seed", type=int, default=0, help="of --load-format dummy")
    add_trust_flag(group)
    add(
        "--cache-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="where converted models are kept (default: $XDG_CACHE_HOME/tandem)",
    )


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    """Add how large its pool and its batches are, and what computes them."""
    add = group.add_argument
    defaults = EngineConfig(model_dir="")
    add("--device", default="cpu", help="cpu, cuda:N, or cuda with --tp")
    add_page_size_flag(group)
    add(
        "--max-total-tokens",
        type=int,
        default=0,
        help="tokens the KV pool holds; 0: 1 GiB of them on the CPU, else --mem-fraction-static",
    )
    add(
        "--mem-fraction-static",
        "--gpu-memory-utilization",
        type=float,
        default=defaults.mem_fraction_static,
        help="share of GPU memory for weights and KV",
    )
    add(
        "--max-running-requests",
        "--max-num-seqs",
        type=int,
        default=defaults.max_running_requests,
        help="requests in one batch",
    )
    add(
        "--max-waiting-requests",
        type=int,
        default=defaults.max_waiting_requests,
        help="requests in line; one more is refused with 429",
    )
    add(
        "--chunked-prefill-size",
        type=int,
        default=defaults.chunked_prefill_size,
        help="prompt tokens in one forward",
    )
    _add_compute_flags(group)


def _add_compute_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--attention-backend",
        choices=["auto", "torch", "cpu", "triton", "flashinfer"],
        default="auto",
        help="auto: the fastest that runs on the device",
    )
    add("--enable-torch-compile", action="store_true", help="compile the model: a slower start")
    add(
        "--enforce-eager",
        "--disable-cuda-graph",
        action="store_true",
        help="record no CUDA graphs and compile nothing",
    )
    add("--num-threads", type=int, default=0, help="of torch on the CPU; 0: torch's choice")
    add(
        "--skip-model-check",
        action="store_true",
        help="do not compare the model with plain transformers at the start",
    )
    add(
        "--disable-prefix-cache",
        "--disable-radix-cache",
        action="store_true",
        help="compute every prompt anew",
    )
    add_tp_flag(group)


def add_simulation_flags(group: argparse._ArgumentGroup) -> None:
    """Add what stands in for a model."""
    add = group.add_argument
    add(
        "--engine",
        choices=["model", "simulated"],
        default="model",
        help="simulated: the whole node, but forwards only take time; `tandem docs simulation` tells how",
    )
    add(
        "--sim-profile",
        type=Path,
        default=None,
        metavar="FILE",
        help="JSON that says how long forwards take, in milliseconds; none: no time at all",
    )
    add(
        "--sim-kv",
        choices=["real", "none"],
        default=None,
        help="real (default): pages have the model's bytes, and these are pushed; none: two bytes a token, "
        "so that a pool of any size fits, of a million tokens unless --max-total-tokens says more",
    )


def add_dtype_flags(group: argparse._ArgumentGroup) -> None:
    """Add the types of weights and of KV."""
    add = group.add_argument
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16", "half"],
        default="auto",
        help="of weights; auto takes the checkpoint's",
    )
    add(
        "--kv-cache-dtype",
        choices=["auto", "fp8_e4m3"],
        default="auto",
        help="of K and V in the pool; auto is the weights'",
    )


def add_page_size_flag(group: argparse._ArgumentGroup) -> None:
    """Add the tokens of a page."""
    group.add_argument(
        "--page-size",
        "--block-size",
        type=int,
        default=EngineConfig(model_dir="").page_size,
        help="tokens a page",
    )


def add_tp_flag(group: argparse._ArgumentGroup) -> None:
    """Add the number of ranks."""
    group.add_argument(
        "--tensor-parallel-size",
        "--tp",
        "--tp-size",
        type=int,
        default=1,
        metavar="N",
        help="processes of this host that share the model; the KV heads must divide evenly",
    )


def add_trust_flag(group: argparse._ArgumentGroup) -> None:
    """Add whether code of the checkpoint runs."""
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run modelling code from the checkpoint"
    )


def read_engine(args: argparse.Namespace) -> EngineConfig:
    """Return what the flags say; `model_dir` is still what the user gave.

    Raises:
        ConfigInvalid: A profile is none.
    """
    return EngineConfig(
        model_dir=args.model or "",
        dtype="float16" if args.dtype == "half" else args.dtype,
        load_format=args.load_format,
        kv_cache_dtype=args.kv_cache_dtype,
        attention_backend=args.attention_backend,
        is_eager=args.enforce_eager,
        is_compiled=args.enable_torch_compile,
        tp_size=args.tensor_parallel_size,
        device=args.device,
        trust_remote_code=args.trust_remote_code,
        random_seed=args.random_seed,
        page_size=args.page_size,
        max_total_tokens=args.max_total_tokens,
        mem_fraction_static=args.mem_fraction_static,
        max_running_requests=args.max_running_requests,
        max_waiting_requests=args.max_waiting_requests,
        chunked_prefill_size=args.chunked_prefill_size,
        context_length=args.context_length,
        # Not a flag of `serve`, whose prompts all are its own.
        local_prefill_tokens=getattr(args, "local_prefill_tokens", 0),
        num_threads=args.num_threads,
        skips_model_check=args.skip_model_check,
        is_prefix_cache_enabled=not args.disable_prefix_cache,
        simulation=_simulation(args),
    )


def _simulation(args: argparse.Namespace) -> Simulation | None:
    if args.engine == "simulated":
        profile = Profile() if args.sim_profile is None else read_profile(args.sim_profile)
        return Simulation(profile=profile, kv=args.sim_kv or "real")
    for flag, value in (("--sim-profile", args.sim_profile), ("--sim-kv", args.sim_kv)):
        if value is not None:
            raise ConfigInvalid(
                f"{flag} {value} is for --engine simulated: give that, too", topic="simulation"
            )
    return None
