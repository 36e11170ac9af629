"""Fuzz everything that listens, and grammars, one target after the other: `python -m tests.fuzz --seconds 60`.

A target fails when it raises, hangs for 120 s or grows beyond 4 GiB; what made it do so is left in
`--directory`, and `python -m tests.fuzz.target NAME FILE` does it again.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("codec", "inbox", "bootstrap", "kv_port", "http", "grammars")


def main() -> int:
    """Run the targets; return 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir(), "fuzz"))
    args = parser.parse_args()
    failed = [
        name for name in args.targets or NAMES if not _run(name, args.seconds, args.directory)
    ]
    print(f"fuzz: {'failed: ' + ', '.join(failed) if failed else 'nothing found'}")
    return int(bool(failed))


def _run(name: str, seconds: int, directory: Path) -> bool:
    corpus = directory / name
    corpus.mkdir(parents=True, exist_ok=True)
    print(f"==> {name}, for {seconds} s, in {corpus}", flush=True)
    limits = [f"-max_total_time={seconds}", "-timeout=120", "-rss_limit_mb=4096", "-max_len=4096"]
    quiet = ["-print_final_stats=1", "-verbosity=1", f"-artifact_prefix={directory}/{name}-"]
    command = [sys.executable, "-m", "tests.fuzz.target", name, *limits, *quiet, str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).splitlines()
    if done.returncode:
        print("\n".join(said[-60:]))
        return False
    last = [line for line in said if "DONE" in line or "number_of_executed_units" in line]
    print("\n".join(last), flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
