"""The flags of what stands behind the prefix cache, with what users of SGLang and vLLM call the same."""

import argparse

from tandem.node.config import TierConfig
from tandem.wire.errors import ConfigInvalid


def add_tier_flags(group: argparse._ArgumentGroup) -> None:
    """Add which tiers there are, and how long a request waits for them."""
    add = group.add_argument
    defaults = TierConfig()
    add(
        "--kv-tier",
        action="append",
        default=[],
        metavar="SPEC",
        help="keep KV beyond the device, to be found instead of computed: host:8GiB, disk:/dir:200GiB or "
        "redis://host:6379/0; repeated, fastest first; `tandem docs tiers` says which for what",
    )
    add(
        "--kv-tier-timeout-ms",
        type=float,
        default=defaults.timeout_s * 1000,
        metavar="MS",
        help="how long a request waits for tiers at most; what is not there by then is computed",
    )
    add(
        "--kv-tier-min-tokens",
        type=int,
        default=defaults.min_tokens,
        metavar="N",
        help="prompts with fewer tokens that are not cached are computed without a look into tiers",
    )
    add(
        "--kv-tier-staging-mib",
        type=int,
        default=defaults.staging_bytes >> 20,
        metavar="MIB",
        help="host memory that pages may take on their way to and from tiers",
    )
    # SGLang's and vLLM's, for memory of the host.
    add("--hicache-size", type=float, default=0.0, help=argparse.SUPPRESS)
    add("--kv-offloading-size", type=float, default=0.0, help=argparse.SUPPRESS)
    add("--enable-hierarchical-cache", action="store_true", help=argparse.SUPPRESS)


def read_tiers(args: argparse.Namespace) -> TierConfig:
    """Return what the flags say.

    Raises:
        ConfigInvalid: A size is missing; the sentence says what to give.
    """
    specs = list(args.kv_tier)
    if args.hicache_size:
        specs.insert(0, f"host:{args.hicache_size:g}GB")
    if args.kv_offloading_size:
        specs.insert(0, f"host:{args.kv_offloading_size:g}GiB")
    if args.enable_hierarchical_cache and not specs:
        raise ConfigInvalid(
            "--enable-hierarchical-cache does not say how large: give --kv-tier host:SIZE, such as host:8GiB",
            topic="tiers",
        )
    return TierConfig(
        specs=tuple(specs),
        timeout_s=args.kv_tier_timeout_ms / 1000,
        min_tokens=args.kv_tier_min_tokens,
        staging_bytes=args.kv_tier_staging_mib << 20,
    )
