"""What requests say. Pure: the same rules and job give the same prompt in every process.

Prompts are random token ids, and random words where an API takes no ids: of the most common English
ones, most of which are one token to most tokenizers. How many tokens a prompt was is then what the
server says.
"""

import numpy as np

from tandem.bench.records import Job, PromptRules
from tandem.bench.trace import BLOCK_TOKENS

_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had "
    "by word but not what all were we when your can said there use an each which she do how their if "
    "will up other about out many then them these so some her would make like him into time has look two "
    "more write go see number no way could people my than first water been call who oil its now find long "
    "down day did get come made may part over new sound take only little work know place year live me "
    "back give most very after thing our just name good"
)

# Streams of random numbers that never meet, whatever the index in them.
_UNIQUE, _PREFIX, _BLOCK = 0, 1, 2


class PromptMaker:
    """Makes what one turn adds to its conversation."""

    def __init__(self, rules: PromptRules) -> None:
        self._rules = rules
        self._words = _WORDS.split()

    def ids(self, job: Job, turn: int) -> list[int]:
        """Return the ids that a turn adds: `turns[turn].input_tokens` of them, and the shared prefix."""
        count = job.turns[turn].input_tokens
        if turn == 0 and job.block_ids:
            return self._of_blocks(job, count)
        own = self._draw(count, _UNIQUE, job.index, turn)
        if turn == 0 and (shared := self._rules.shared_prefix_tokens):
            return self._draw(shared, _PREFIX, job.prefix) + own
        return own

    def text(self, job: Job, turn: int) -> str:
        """Return the same as words, one for each id."""
        return " ".join(
            self._words[token_id % len(self._words)] for token_id in self.ids(job, turn)
        )

    def _of_blocks(self, job: Job, count: int) -> list[int]:
        found: list[int] = []
        for block_id in job.block_ids[: -(-count // BLOCK_TOKENS)]:
            found += self._draw(BLOCK_TOKENS, _BLOCK, block_id)
        if (missing := count - len(found)) > 0:
            return found + self._draw(missing, _UNIQUE, job.index, 0)
        return found[:count]

    def _draw(self, count: int, *stream: int) -> list[int]:
        rng = np.random.default_rng([self._rules.seed, *stream])
        drawn: list[int] = rng.integers(0, self._rules.vocab_size, count).tolist()
        return drawn
