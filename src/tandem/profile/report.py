"""What was measured, as a profile and as a table."""

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tandem.engine.profile import DecodeTimes, NodeFigures, PrefillTimes, Profile
from tandem.engine.shape import ModelShape
from tandem.node.config import NodeConfig
from tandem.profile.fitting import Fit, Timed
from tandem.profile.grid import PrefillPoint
from tandem.telemetry.version import package_version


@dataclass(frozen=True, slots=True)
class Measured:
    """One node.

    Attributes:
        num_tokens: That its pool holds.
        host_s: What steps took beside the device.
        link_bytes_per_s: To another pool of this host; 0: not measured.
    """

    node: NodeConfig
    shape: ModelShape
    num_tokens: int
    prefill: Fit[PrefillTimes]
    decode: Fit[DecodeTimes]
    host_s: Sequence[float]
    link_bytes_per_s: float

    @property
    def device(self) -> str:
        """Return the device in words."""
        settings = self.node.engine
        if settings.device == "cpu":
            threads = f", {settings.num_threads} threads" if settings.num_threads else ""
            return f"{platform.processor() or platform.machine()} CPU{threads}"
        return settings.device

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of KV of a token, of all ranks."""
        return self.shape.kv_bytes_per_token * self.node.engine.tp_size


def profile_of(measured: Measured) -> Profile:
    """Return the profile, with what else `tandem plan` wants to know."""
    settings = measured.node.engine
    figures = NodeFigures(
        model=measured.node.served_model_name,
        device=measured.device,
        num_devices=settings.tp_size,
        num_tokens=measured.num_tokens,
        page_size=settings.page_size,
        kv_bytes_per_token=measured.kv_bytes_per_token,
        num_layers=measured.shape.num_layers,
        context_length=measured.shape.context_length,
        max_running_requests=settings.max_running_requests,
        chunked_prefill_size=settings.chunked_prefill_size,
        link_bytes_per_s=_rounded(measured.link_bytes_per_s),
        host_step_ms=_rounded(1000 * statistics.median(measured.host_s)),
        is_overlapped=settings.device != "cpu",
        prefill_error=_rounded(measured.prefill.mean_error),
        decode_error=_rounded(measured.decode.mean_error),
    )
    today = datetime.now(UTC).date().isoformat()
    return Profile(
        origin=f"Measured by tandem profile {package_version()} on {today}: {figures.model}, "
        f"{measured.shape.dtype}, on {figures.num_devices} x {figures.device}; "
        f"off by {figures.prefill_error:.1%} (prefill) and {figures.decode_error:.1%} (decode) on average.",
        prefill=PrefillTimes(**_rounded_fields(measured.prefill.times)),
        decode=DecodeTimes(**_rounded_fields(measured.decode.times)),
        node=figures,
    )


def render(measured: Measured, console: Console) -> None:
    """Print every point beside what the profile says of it, then the profile."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("forward", no_wrap=True)
    for title in ("tokens before", "measured", "profile", "off by"):
        table.add_column(title, justify="right", no_wrap=True)
    for fit in (measured.prefill, measured.decode):
        for number, point in enumerate(fit.points, 1):
            table.add_row(*_row(point), end_section=number == len(fit.points))
    console.print(table)
    for line in _sentences(measured):
        console.print(line, soft_wrap=True)


def _row(timed: Timed) -> tuple[str, ...]:
    match timed.point:
        case PrefillPoint(num_new, num_context):
            name = f"prefill, {num_new:,} tokens"
        case point:
            name, num_context = f"decode, {point.batch:,} answers", point.num_context
    times = (f"{1000 * each:,.2f} ms" for each in (timed.measured_s, timed.fitted_s))
    return name, f"{num_context:,}", *times, f"{timed.error:+.1%}"


def _sentences(measured: Measured) -> list[str]:
    profile = profile_of(measured)
    prefill, decode, figures = profile.prefill, profile.decode, profile.node
    assert figures is not None
    lines = [
        f"prefill: {prefill.base_ms:g} ms, {prefill.per_token_ms:g} ms a token, "
        f"{prefill.per_context_token_ms:g} ms a token before it, {prefill.per_pair_ms:g} ms a pair of both; "
        f"{_off(measured.prefill)}",
        f"decode: {decode.base_ms:g} ms, {decode.per_request_ms:g} ms an answer, "
        f"{decode.per_context_token_ms:g} ms a token that it reads; {_off(measured.decode)}",
        f"pool: {figures.num_tokens:,} tokens of {figures.kv_bytes_per_token:,} bytes; "
        f"the loop's own time {figures.host_step_ms:g} ms a step",
    ]
    if figures.link_bytes_per_s:
        lines.append(f"to a node of this host: {figures.link_bytes_per_s / 1e9:.1f} GB/s")
    else:
        lines.append("what a link carries was not measured: `tandem plan --link-gbit` says it")
    return lines


def _off(fit: Fit[PrefillTimes] | Fit[DecodeTimes]) -> str:
    return f"off by {fit.mean_error:.1%} on average, at worst by {fit.worst.error:+.1%}"


def _rounded(value: float) -> float:
    """Return four digits: more than a fit is good for."""
    return float(f"{value:.4g}")


def _rounded_fields(times: PrefillTimes | DecodeTimes) -> dict[str, float]:
    return {name: _rounded(value) for name, value in msgspec.structs.asdict(times).items()}
