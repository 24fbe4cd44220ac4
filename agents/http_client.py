"""How does a call reach a server? One client, a limit on calls in flight, retries, and a choice of replica."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import math
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import aiohttp
import httpx
import stamina
from httpx_aiohttp import AiohttpTransport

from srpo_env.errors import PolicyError

T = TypeVar("T")
Transport = Literal["aiohttp", "httpx"]

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_LONGEST_RETRY_AFTER_S = 120.0
_JITTER_S = 1.0
_CONNECT_S = 10.0
_DOUBT_S = 10.0
_SPARE_CONNECTIONS = 8
_SHOWN = 300


class FailedAttempt(Exception):
    """A call that may be made again.

    Attributes:
        wait_s: How long the server asked to wait; None where it did not.
        busy: Whether the server is sound and only asked to wait.
    """

    def __init__(self, message: str, *, wait_s: float | None = None, busy: bool = False) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.busy = busy


class Refused(PolicyError):
    """A reply that says that the call itself is wrong; it is not made again.

    Attributes:
        status: The HTTP status, a 3xx or 4xx.
        said: What the server said, without the key.
    """

    def __init__(self, message: str, *, status: int, said: str) -> None:
        super().__init__(message)
        self.status = status
        self.said = said


@dataclass(slots=True, eq=False)
class Replica:
    """One of the servers.

    Attributes:
        url: Its address, ending in /v1.
        in_flight: Calls that it is busy with.
        doubted_until: Monotonic time until which it is left alone, after a call that failed.
    """

    url: str
    in_flight: int = 0
    doubted_until: float = -math.inf


class HttpClient:
    """Calls replicas of one server; lives on the loop where it is first used.

    Calls that wait for their turn do so before their time runs, and hold no place while they back off.

    Args:
        urls: Addresses of the replicas, ending in /v1.
        who: The policy, for messages.
        key: Sent as a bearer token; struck out of whatever a server says.
        max_in_flight: Most calls at once, over all replicas.
        timeout_s: Longest time of one attempt.
        attempts: Most attempts of a call.
        transport: Whose connections carry the calls: see benchmarks/http_transports.py.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        who: str,
        key: str | None,
        max_in_flight: int,
        timeout_s: float,
        attempts: int,
        transport: Transport,
    ) -> None:
        self.replicas = [Replica(url) for url in urls]
        self._who = who
        self._key = key
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._places = asyncio.Semaphore(max_in_flight)
        self._connections = max_in_flight + len(urls) + _SPARE_CONNECTIONS
        self._transport = transport

    async def call(
        self,
        attempt: Callable[[Replica], Awaitable[T]],
        *,
        home: int | None = None,
        only: Replica | None = None,
        in_turn: bool = True,
    ) -> tuple[T, int]:
        """Makes a call until it succeeds.

        Args:
            attempt: One attempt, on the replica that it is given.
            home: Calls of one home go to one replica, unless that is in doubt; None: to the least busy.
            only: The one replica that it is for.
            in_turn: Whether it takes a place among the calls in flight, and waits for one. A call that those who hold
                places may wait for must not.

        Returns:
            What `attempt` returned, and the number of attempts.

        Raises:
            PolicyError: All attempts failed, or the server refused the call.
        """
        retries = stamina.retry_context(
            on=_wait,
            attempts=self._attempts,
            timeout=None,
            wait_initial=_FIRST_WAIT_S,
            wait_max=_LONGEST_WAIT_S,
            wait_jitter=_JITTER_S,
        )
        try:
            async for each in retries:
                with each:
                    async with self._places if in_turn else nullcontext():
                        return await self._on(only or self._choose(home), attempt), each.num
        except FailedAttempt as error:
            raise PolicyError(
                f"policy {self._who!r}: all {self._attempts} attempts failed, the last one: {error} Is the server up "
                "and sound? See its log; `attempts` and `timeout_s` say how long to try."
            ) from error
        raise AssertionError("stamina ends by an error")

    async def send(self, replica: Replica, method: str, url: str, body: Any = None) -> httpx.Response:
        """Makes one attempt and returns the reply, whose status is 200.

        Raises:
            FailedAttempt: No whole reply came in time, or its status is 408, 429 or 5xx.
            Refused: Any other status.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._client.request(method, url, json=body)
        except TimeoutError:
            raise FailedAttempt(f"{method} {url}: no whole reply within {self._timeout_s:g} s.") from None
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            problem = self._redacted(str(error)) or "no whole reply"
            raise FailedAttempt(f"{method} {url}: {type(error).__name__}: {problem}.") from None
        status = reply.status_code
        if status == httpx.codes.OK:
            return reply
        said = self._redacted(_said(reply))[:_SHOWN]
        message = f"{method} {url}: HTTP {status}: {said}"
        if status in (408, 429) or status >= 500:
            raise FailedAttempt(message, wait_s=retry_after_s(reply.headers, time.time()), busy=status == 429)
        raise Refused(f"policy {self._who!r}: {message}{_remedy(status)}", status=status, said=said)

    async def aclose(self) -> None:
        """Closes all connections."""
        if "_client" in self.__dict__:
            await self._client.aclose()

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=self._connections, max_keepalive_connections=self._connections)
        client = httpx.AsyncClient(
            headers={} if self._key is None else {"Authorization": f"Bearer {self._key}"},
            transport=AiohttpTransport(limits=limits) if self._transport == "aiohttp" else None,
            limits=limits,
            # Beside it, `_timeout_s` is of a whole attempt, the reading of the reply included.
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
        )
        weakref.finalize(self, _close, client, asyncio.get_running_loop())
        return client

    def _choose(self, home: int | None) -> Replica:
        now = time.monotonic()
        sound = [each for each in self.replicas if each.doubted_until <= now]
        if not sound:
            return min(self.replicas, key=lambda each: each.doubted_until)
        mine = None if home is None else self.replicas[home % len(self.replicas)]
        return mine if mine in sound else min(sound, key=lambda each: each.in_flight)

    async def _on(self, replica: Replica, attempt: Callable[[Replica], Awaitable[T]]) -> T:
        replica.in_flight += 1
        try:
            result = await attempt(replica)
        except FailedAttempt as error:
            if not error.busy:
                replica.doubted_until = time.monotonic() + _DOUBT_S
            raise
        finally:
            replica.in_flight -= 1
        replica.doubted_until = -math.inf
        return result

    def _redacted(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _close(client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
    """Closes what nobody closed, from wherever that is noticed."""
    if loop.is_running() and not client.is_closed:
        asyncio.run_coroutine_threadsafe(client.aclose(), loop)


def as_json(reply: httpx.Response) -> Any:
    """Returns what a reply's body says.

    Raises:
        FailedAttempt: It is not JSON, such as half of it.
    """
    try:
        return reply.json()
    except ValueError as error:  # of json, and of bytes that are no text
        raise FailedAttempt(f"{reply.url}: the reply is not JSON ({type(error).__name__}).") from None


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Returns how long a reply asks to wait: the header Retry-After, in seconds or as an HTTP date.

    Args:
        headers: The reply's.
        now: Seconds since the epoch.
    """
    given = headers.get("Retry-After", "")
    try:
        wait_s = float(given)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(given).timestamp() - now
        except ValueError:
            return None
    return min(max(wait_s, 0.0), _LONGEST_RETRY_AFTER_S) if math.isfinite(wait_s) else None


def _wait(error: Exception) -> bool | float:
    """Whether a call is made again, or after how many seconds."""
    if not isinstance(error, FailedAttempt):
        return False
    return True if error.wait_s is None else error.wait_s + random.uniform(0.0, _JITTER_S)


def _said(reply: httpx.Response) -> str:
    """The server's own message, on one line."""
    try:
        data = reply.json()
    except ValueError:
        data = reply.text
    for key in ("error", "message", "detail"):
        if isinstance(data, Mapping) and key in data:
            data = data[key]
    return " ".join(str(data).split()) or "(no message)"


def _remedy(status: int) -> str:
    if status in (401, 403):
        return " Name the environment variable that holds the key: `api_key_env`."
    if status == 404:
        return " Check `urls` (they end in /v1) and `served_model`."
    return " The server refuses the call itself, so it was not made again."


# stamina logs each retry as a bare event name; the outcome's `attempts`, or its error, says more.
logging.getLogger("stamina").addFilter(
    lambda record: not str(getattr(record, "stamina.caused_by", "")).startswith(FailedAttempt.__name__)
)
