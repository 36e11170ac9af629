"""A router's page and `/overview`, served for real, of which a test says what it shows."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Iterator

from aiohttp import web

from tandem.frontend.app import create_app
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.router.console.console import OverviewApi, PageFiles
from tandem.router.console.overview import Overview
from tests.frontend.fakes import FakeBackend
from tests.kept_port import keep_port
from tests.patience import PATIENCE_S


class Stage:
    """It may be gone for a while. `overview` is read anew for each answer."""

    def __init__(self, shown: Overview, api_keys: tuple[str, ...] = ()) -> None:
        self.shown, self._api_keys = shown, api_keys
        kept, self._port = keep_port()  # while it is gone, too
        weakref.finalize(self, kept.close)
        self.url = f"http://127.0.0.1:{self._port}/"

    def overview(self) -> Overview:
        return self.shown

    @contextlib.contextmanager
    def open(self) -> Iterator["Stage"]:
        """Serve inside the block."""
        loop, is_open, closing = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

        async def serve() -> None:
            page = PageFiles()
            http = HttpOptions(api_keys=self._api_keys)
            options = FrontendOptions(http=http, open_paths=page.paths)
            app = create_app(FakeBackend(None), options)
            app.add_routes([*OverviewApi(self).routes(), *page.routes()])
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._port, reuse_address=True).start()
            is_open.set()
            await closing.wait()
            await runner.cleanup()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        try:
            assert is_open.wait(PATIENCE_S)
            yield self
        finally:
            loop.call_soon_threadsafe(closing.set)
            thread.join()
            loop.close()
