"""The HTTP process of a node: serves its engine, watches it, ends with it."""

import asyncio
import signal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from frontend.app import FrontendOptions, create_app
from frontend.engine_client import EngineClient
from frontend.tokenizer import Tokenizer, tokenizer_files, tokenizer_hash
from node.config import NodeConfig
from node.engine_process import EngineProcess
from node.engine_report import Ready
from node.local_backend import LocalBackend
from telemetry.log import get_logger
from wire.channel import ChannelKey, tcp_address
from wire.ids import Epoch

log = get_logger(__name__)


def package_version() -> str:
    """Return the installed version, or `0+source` when run from a checkout."""
    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "0+source"
