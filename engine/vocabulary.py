"""The model's tokens as the grammar library wants them: read from tokenizer.json by a child process.

A child, because the tokenizer library holds the interpreter's lock while it parses: 0.4 s for 49
thousand tokens, several times that for the largest, in which the engine's loop would stand still
and its peers might take the node for lost. The parent takes over the finished table in 0.05 s.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import xgrammar
from transformers import PreTrainedTokenizerFast

from tandem.telemetry.log import get_logger
from tandem.wire.errors import EngineFailed, InvalidRequest

log = get_logger(__name__)

# 3 s for 49 thousand tokens on two cores, nearly all of it imports.
_TIME_LIMIT_S = 120


def load_vocabulary(
    model_dir: Path, vocab_size: int, eos_token_ids: Iterable[int]
) -> xgrammar.TokenizerInfo:
    """Return the bytes of every token id; blocks for seconds, without the interpreter's lock.

    Args:
        vocab_size: Width of the logits, at least that of the tokenizer.
        eos_token_ids: What may follow a finished grammar; at least one below `vocab_size`.

    Raises:
        InvalidRequest: The model has no tokenizer.json, or no end of sequence.
        EngineFailed: The child died or could not read the file; its words are in the log.
    """
    if not (model_dir / "tokenizer.json").is_file():
        raise InvalidRequest(
            "structured output needs the model's tokenizer, and this model has no tokenizer.json"
        )
    ends = [str(token) for token in sorted(eos_token_ids) if 0 <= token < vocab_size]
    if not ends:
        raise InvalidRequest(
            "structured output needs a model with an end-of-sequence token, and this one has none"
        )
    try:
        done = subprocess.run(  # noqa: S603 - our own module, arguments as a list
            [
                sys.executable,
                "-P",
                "-m",
                "engine.vocabulary",
                str(model_dir),
                str(vocab_size),
                *ends,
            ],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(f"reading tokenizer.json took over {_TIME_LIMIT_S} s") from error
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip()[-2000:]
        log.error("grammar.vocabulary_failed", status=done.returncode, stderr=words)
        raise EngineFailed("structured output is out of order: tokenizer.json cannot be read")
    return xgrammar.TokenizerInfo.deserialize_json(done.stdout.decode())


def read_vocabulary(
    model_dir: Path, vocab_size: int, eos_token_ids: list[int]
) -> xgrammar.TokenizerInfo:
    """Return what `load_vocabulary` does, in this process and holding the interpreter's lock."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
    raw = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=eos_token_ids
    )
    tokens: list[bytes | str] = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size:
            tokens[token_id] = token
    # The library knows special tokens by their look and takes `<|im_start|>` for its twelve
    # characters. Without text, no grammar allows it: the detokenizer would leave it out.
    for token_id, added in tokenizer.added_tokens_decoder.items():
        if added.special and token_id < vocab_size:
            tokens[token_id] = ""
    return xgrammar.TokenizerInfo.from_vocab_and_metadata(tokens, raw.dump_metadata())


def main() -> int:
    """Write the table of `model_dir vocab_size eos_token_id...` to standard output."""
    model_dir, vocab_size, *ends = sys.argv[1:]
    info = read_vocabulary(Path(model_dir), int(vocab_size), [int(end) for end in ends])
    sys.stdout.write(info.serialize_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
