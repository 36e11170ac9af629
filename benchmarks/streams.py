"""The load of serving benchmarks: a closed loop of `tandem bench`'s client."""

import time

from tandem.bench.client import drive
from tandem.bench.config import BenchConfig, Load
from tandem.bench.report import LoadReport, summarise
from tandem.bench.workload import make_jobs

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
        num_prompts=num_requests,
        input_tokens=prompt_tokens,
        output_tokens=new_tokens,
        vocab_size=VOCAB_SIZE,
        seed=seed,
    )
    load, began_s = Load(concurrency), time.process_time()
    samples = await drive(config, make_jobs(config, load, 0), concurrency)
    return summarise(load, samples, time.process_time() - began_s)
