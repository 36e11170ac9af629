"""What has to be known of a server before it is driven: its model, and how many ids there are."""

import http.client
import ssl
import urllib.error
import urllib.request
from typing import TypeVar

import msgspec

from tandem.bench.config import BenchConfig
from tandem.bench.records import Server
from tandem.wire.errors import ConfigInvalid

# Where the server does not say: as many ids as nearly every model has.
FALLBACK_VOCAB_SIZE = 10_000
TIMEOUT_S = 10.0
T = TypeVar("T", bound=msgspec.Struct)


class Unreachable(Exception):
    """The server does not answer; the sentence says what to do."""


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card] = []


class _Info(msgspec.Struct):
    vocab_size: int | None = None


def find_server(config: BenchConfig) -> Server:
    """Return what is driven, its model asked for where it was not given.

    Raises:
        Unreachable: Nothing answers at the URL.
        ConfigInvalid: An OpenAI API is to be driven, and which model is not known.
    """
    told = _get(config, "/v1/models", _Models)
    model = config.model or (told.data[0].id if told and told.data else "")
    if not model and config.api != "native":
        raise ConfigInvalid(f"--model: {config.url} does not say which it serves; name it")
    return Server(
        url=config.url,
        api=config.api,
        model=model,
        api_key=config.api_key,
        is_eos_ignored=config.is_eos_ignored,
        extra_body=config.extra_body,
        timeout_s=config.timeout_s,
    )


def find_vocab_size(config: BenchConfig) -> int:
    """Return how many ids prompts are drawn from.

    Raises:
        Unreachable: Nothing answers at the URL.
    """
    if config.vocab_size:
        return config.vocab_size
    told = _get(config, "/model_info", _Info)
    return (told and told.vocab_size) or FALLBACK_VOCAB_SIZE


def _get(config: BenchConfig, path: str, kind: type[T]) -> T | None:
    """Return the answer to a GET; None where the server has no such route, or another answer."""
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    request = urllib.request.Request(config.url + path, headers=headers)  # noqa: S310 - http(s) only
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            return msgspec.json.decode(response.read(), type=kind)
    except (urllib.error.HTTPError, msgspec.MsgspecError):
        return None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise Unreachable(
                f"the certificate of {config.url} is not trusted ({reason.verify_message}): name a file "
                "with its authority in the environment variable SSL_CERT_FILE"
            ) from error
        raise Unreachable(
            f"{config.url} does not answer ({reason}): start a server, or give its --url"
        ) from error
