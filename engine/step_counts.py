"""What an engine counts of its forwards, for its operators."""

from typing_extensions import override

from tandem.engine.launched import Launched
from tandem.telemetry.histogram import Histogram

# From a small batch on a fast GPU to a long chunk on a CPU.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Tokens of prompts from which a forward tells what one costs: below, most of it is the weights' way in.
_MIN_PROMPT = 64
# Weight of the newest forward in what a prompt token costs: the last ten are two thirds of it.
_NEWEST = 0.1


class StepCounts:
    """Forwards that were collected.

    Attributes:
        device_seconds: How long the device had to do with each.
        requests: That took part in each.
        tokens: Computed by each: one for each request that decodes, and the chunks of prompts.
        num_collected: How many there were.
        host_cpu_s: CPU time of the engine's thread in all of them; see `ForwardTimes`.
        prompt_token_s: How long the device has for one prompt token, of late; 0 before it computed any.
    """

    def __init__(self) -> None:
        self.device_seconds = Histogram(_SECONDS)
        self.requests = Histogram(_REQUESTS)
        self.tokens = Histogram(_TOKENS)
        self.num_collected = 0
        self.host_cpu_s = 0.0
        self.prompt_token_s = 0.0

    def collected(self, launched: Launched) -> None:
        """Count a forward whose tokens were read."""
        times, batch = launched.outcome.times(), launched.batch
        self.num_collected += 1
        self.device_seconds.observe(times.device_s)
        self.host_cpu_s += times.host_cpu_s
        self.requests.observe(len(batch.decodes) + len(batch.chunks))
        num_prompt = sum(chunk.num_tokens for chunk in batch.chunks)
        num_tokens = len(batch.decodes) + num_prompt
        self.tokens.observe(num_tokens)
        # A share of a forward by tokens is fair to a prompt only where it has most of them.
        if num_prompt >= max(_MIN_PROMPT, len(batch.decodes)):
            self._note_prompt_token(times.device_s / num_tokens)

    def _note_prompt_token(self, seconds: float) -> None:
        weight = _NEWEST if self.prompt_token_s else 1.0
        self.prompt_token_s += weight * (seconds - self.prompt_token_s)

    @override
    def __repr__(self) -> str:
        return f"StepCounts({self.device_seconds!r})"
