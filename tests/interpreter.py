"""Triton's interpreter, in a process of its own: triton decides at import whether it interprets."""

import json
import os
import subprocess
import sys
from typing import Any


def interpreted(module: str, *arguments: str) -> Any:
    """Run a module that executes Triton kernels on CPU tensors, and return the JSON value that it prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", module, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
