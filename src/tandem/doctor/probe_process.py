"""A probe as its parent sees it: started, told, heard, and ended whatever it does."""

import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Self

from tandem.doctor.pipe import RankPipe
from tandem.doctor.probe import FromProbe, ToProbe
from tandem.wire.errors import PeerLost, TransferTimeout

# How often a wait looks whether the far end is still there.
WATCH_S = 0.25
END_TIMEOUT_S = 2.0
# From the end of what it says to its status: one that aborts may have its memory written to the disk before.
STATUS_TIMEOUT_S = 30.0


class Probe:
    """A process that is one end of a transport; ended by `close`, whatever it does then."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        # A session of its own: Ctrl-C reaches its parent alone, which then ends it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tandem.doctor.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe: RankPipe[FromProbe] = RankPipe(
            self._process.stdout, self._process.stdin, FromProbe
        )
        self._answers: queue.SimpleQueue[FromProbe | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="probe-reader", daemon=True)
        self._reader.start()

    def tell(self, message: ToProbe) -> None:
        """Send it a message.

        Raises:
            PeerLost: The process ended.
        """
        self._pipe.send(message)

    def answer(self, timeout_s: float, watch: Callable[[], None] = lambda: None) -> FromProbe:
        """Wait for its next message, calling `watch` meanwhile.

        Raises:
            PeerLost: The process ended; with what it said last.
            TransferTimeout: There is none in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                answer = self._answers.get(timeout=WATCH_S)
            except queue.Empty:
                watch()
                if time.monotonic() > deadline_s:
                    raise TransferTimeout(f"it did not end within {timeout_s:.0f} s") from None
                continue
            if answer is None:
                raise PeerLost(
                    f"its process ended with status {self._status()}: {self._last_words()}"
                )
            return answer

    def close(self) -> None:
        """End the process: by closing its standard input, and by force if that is not enough."""
        self._pipe.hang_up()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _read(self) -> None:
        while (answer := self._pipe.receive()) is not None:
            self._answers.put(answer)
        self._answers.put(None)

    def _status(self) -> int:
        try:
            return self._process.wait(STATUS_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # its standard output is closed, and it goes on
            return 0

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "it said nothing"
