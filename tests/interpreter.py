"""Triton's interpreter, in a process of its own: triton decides at import whether it interprets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def interpreted(module: str, *arguments: str) -> Any:
    """Run a module that executes Triton kernels on CPU tensors, and return the JSON value that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
