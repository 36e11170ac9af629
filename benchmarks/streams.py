"""The load of the serving benchmarks: a closed loop with the client of `tandem bench`."""

import time

from tandem.tools.bench.client import drive
from tandem.tools.bench.config import BenchConfig
from tandem.tools.bench.load import planned
from tandem.tools.bench.report import LoadReport, summarise

# Every measured model has at least this many token ids.
VOCAB_SIZE = 40_000


async def closed_loop(
    url: str,
    concurrency: int,
    num_requests: int,
    prompt_tokens: int,
    new_tokens: int,
    *,
    seed: int = 0,
    model: str = "",
) -> LoadReport:
    """Keep `concurrency` requests open until `num_requests` are answered.

    Args:
        model: Model name in requests over OpenAI's API; empty: use the native API.
    """
    config = BenchConfig(
        url=url,
        api="completions" if model else "native",
        model=model,
        max_concurrency=concurrency,
        num_prompts=num_requests,
        input_tokens=prompt_tokens,
        output_tokens=new_tokens,
        vocab_size=VOCAB_SIZE,
        seed=seed,
    )
    began_s = time.process_time()
    samples = await drive(config, planned(config), concurrency)
    return summarise(samples, time.process_time() - began_s)
