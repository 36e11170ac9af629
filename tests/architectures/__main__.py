"""What becomes of every architecture that transformers maps to a causal language model.

python -m tests.architectures            a line each: equal, refused, or what is wrong
python -m tests.architectures llama ...  of some
python -m tests.architectures --write    write docs/models.md from the cases and the table of refusals
"""

import argparse
import io
import tempfile
import time
import warnings
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import transformers

from tests.architectures.configs import Case, cases
from tests.architectures.page import PATH, page
from tests.architectures.runs import differences, refusal


def outcome(case: Case, directory: Path) -> str:
    """Return what becomes of an architecture, in a line."""
    try:
        if why := refusal(case, directory):
            return f"refused: {' '.join(why.split())}"
        wrong = differences(case, directory)
    except Exception as error:  # noqa: BLE001 - whatever it is, the line names it
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"WRONG: {'; '.join(wrong)}" if wrong else "equal"


def main() -> None:
    """Print a line for every case, or for those of some architectures; or write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=main.__doc__)
    parser.add_argument("types", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--write", action="store_true", help=f"write {PATH.name}, and run nothing")
    args = parser.parse_args()
    if args.write:
        PATH.write_text(page())
        return
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    counts = Counter[str]()
    for case in cases():
        if args.types and case.model_type not in args.types:
            continue
        began_s = time.process_time()
        with tempfile.TemporaryDirectory() as directory, redirect_stdout(io.StringIO()):
            told = outcome(case, Path(directory))
        counts[told.partition(":")[0]] += 1
        print(f"{case.name:36} {time.process_time() - began_s:5.2f} s  {told}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
