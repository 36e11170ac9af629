"""One container of a pod over all its lives: its probes, its restarts, and its end."""

import time
import urllib.request

from tests.kubernetes.control_plane import now
from tests.kubernetes.sandbox import Container

PROBE_PERIOD_S = 0.5
RESTART_PAUSE_S = 1.0


class RunningContainer:
    """One container of a pod, over all its lives."""

    def __init__(self, spec: dict, address: str, start, *, restarts: bool) -> None:
        self._spec, self._address, self._start, self._restarts = spec, address, start, restarts
        self._num_restarts = -1
        self._container: Container | None = None
        self._begin()

    def _begin(self) -> None:
        self._container = self._start()
        self._num_restarts += 1
        self._started_at, self._resume_at = now(), 0.0
        self._exit_status: int | None = None
        self._is_started = "startupProbe" not in self._spec
        self._is_ready = False
        self._probes = {
            kind: Probe(self._spec[f"{kind}Probe"], self._spec, self._address, period_s)
            for kind, period_s in (
                ("startup", PROBE_PERIOD_S),
                ("readiness", PROBE_PERIOD_S),
                ("liveness", None),
            )
            if f"{kind}Probe" in self._spec
        }

    def look(self) -> None:
        """Notice what happened since the last look, and ask what is due."""
        assert self._container is not None
        if self._exit_status is None:
            self._exit_status = self._container.status()
            if self._exit_status is None:
                self._ask()
                return
            self._is_ready = self._is_started = False
            self._resume_at = time.monotonic() + RESTART_PAUSE_S
        elif self._restarts and time.monotonic() > self._resume_at:
            self._begin()

    def _ask(self) -> None:
        if not self._is_started:
            startup = self._probes["startup"]
            startup.look()
            self._is_started = startup.is_passed
            self._kill_if(startup.has_failed)
            return
        for probe in (self._probes.get("readiness"), self._probes.get("liveness")):
            if probe is not None:
                probe.look()
        readiness, liveness = self._probes.get("readiness"), self._probes.get("liveness")
        self._is_ready = readiness is None or readiness.holds
        self._kill_if(liveness is not None and liveness.has_failed)

    def _kill_if(self, has_failed: bool) -> None:
        if has_failed and self._container is not None:
            self._container.stop(time.monotonic() + 2)

    def end(self, deadline: float) -> None:
        """End it, by force at the deadline."""
        container = self._container
        if container is None or self._exit_status is not None:
            return
        assert "lifecycle" not in self._spec, "no hook is known here"
        self._exit_status = container.stop(deadline)

    def status(self) -> dict:
        """Return its status as the API takes it."""
        state: dict = {"running": {"startedAt": self._started_at}}
        if self._exit_status is not None:
            state = {"terminated": {"exitCode": abs(self._exit_status), "reason": "Ended"}}
        return {
            "name": self._spec["name"],
            "image": self._spec["image"],
            "imageID": "this machine",
            "ready": self._is_ready,
            "started": self._is_started,
            "restartCount": self._num_restarts,
            "state": state,
        }

    def close(self) -> None:
        """End it at once if it runs."""
        if self._container is not None and self._exit_status is None:
            self._exit_status = self._container.kill()


class Probe:
    """One probe of one life of a container.

    Attributes:
        holds: Whether it is passed now.
        is_passed: Whether it ever was.
        has_failed: Whether it failed too often in a row.
    """

    def __init__(self, probe: dict, container: dict, address: str, period_s: float | None) -> None:
        get, port = probe["httpGet"], probe["httpGet"]["port"]
        named = {one.get("name"): one["containerPort"] for one in container.get("ports") or []}
        self._url = f"http://{address}:{named.get(port, port)}{get['path']}"
        self._period_s = period_s or probe["periodSeconds"]
        self._timeout_s = probe["timeoutSeconds"]
        self._threshold = probe["failureThreshold"]
        if period_s is not None:  # as long as the manifest gives
            self._threshold = max(
                self._threshold, int(self._threshold * probe["periodSeconds"] / period_s)
            )
        self._next = 0.0
        self._num_failures = 0
        self.holds = self.is_passed = self.has_failed = False

    def look(self) -> None:
        if time.monotonic() < self._next:
            return
        if self._answers():
            self._num_failures = 0
            self.holds = self.is_passed = True
        else:
            self._num_failures += 1
            self.has_failed = self._num_failures >= self._threshold
            self.holds = self.holds and not self.has_failed
        self._next = time.monotonic() + self._period_s

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._url, timeout=self._timeout_s) as response:
                return 200 <= response.status < 400
        except OSError:
            return False
