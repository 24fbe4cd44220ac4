"""CPU of one completion call through httpx: its own transport against httpx-aiohttp's, at 256 in flight.

    OMP_NUM_THREADS=1 python benchmarks/http_transports.py [--calls 4096] [--in-flight 256] [--repeats 3]

A server in a process of its own answers on loopback after 20 ms, with 64 token ids and log-probs; the CPU time is this
process's, for building the request, the call and reading the JSON. Only the ratio inside one run means anything.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection

import httpx
from httpx_aiohttp import AiohttpTransport

TOKENS = 64
DELAY_S = 0.02
CHOICE = {
    "index": 0,
    "text": "word " * TOKENS,
    "token_ids": list(range(1000, 1000 + TOKENS)),
    "prompt_token_ids": list(range(128)),
    "logprobs": {"token_logprobs": [-1.2345678] * TOKENS, "tokens": ["word "] * TOKENS},
    "finish_reason": "stop",
}
BODY = json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [CHOICE]}).encode()
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
REQUEST = {"model": "m", "prompt": list(range(128)), "max_tokens": TOKENS, "return_token_ids": True, "logprobs": 0}


class Answering(asyncio.Protocol):
    """Answers every request of a connection, parsing no more of it than where it ends."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._connection, self._read = transport, b""

    def data_received(self, data: bytes) -> None:
        """Answers once a request is whole."""
        self._read += data
        head, blank, body = self._read.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        if blank and len(body) >= int(length or 0):
            self._read = b""
            asyncio.get_running_loop().call_later(DELAY_S, self._connection.write, ANSWER)


def serve(port: Connection) -> None:
    """Serves until the process is ended."""

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def cpu_of(transport: httpx.AsyncBaseTransport, url: str, calls: int, in_flight: int) -> float:
    """Returns the CPU seconds of a call, once all connections are open."""
    gate = asyncio.Semaphore(in_flight)

    async with httpx.AsyncClient(transport=transport, timeout=60) as client:

        async def call() -> None:
            async with gate:
                answer = await client.post(url, json=REQUEST)
                assert len(answer.json()["choices"][0]["token_ids"]) == TOKENS

        await asyncio.gather(*(call() for _ in range(in_flight)))
        began = time.process_time()
        await asyncio.gather(*(call() for _ in range(calls)))
        return (time.process_time() - began) / calls


def main() -> None:
    """Prints the CPU milliseconds of a call by transport, the best of its repeats, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=4096)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    limits = httpx.Limits(max_connections=arguments.in_flight, max_keepalive_connections=arguments.in_flight)
    ways: dict[str, Callable[[], httpx.AsyncBaseTransport]] = {
        "httpx": lambda: httpx.AsyncHTTPTransport(limits=limits),
        "httpx-aiohttp": lambda: AiohttpTransport(limits=limits),
    }
    receiver, sender = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(sender,), daemon=True)
    server.start()
    times: dict[str, list[float]] = {way: [] for way in ways}
    try:
        url = f"http://127.0.0.1:{receiver.recv()}/v1/completions"
        for _ in range(arguments.repeats):  # interleaved, so that a busy neighbour slows both
            for way, transport in ways.items():
                times[way].append(asyncio.run(cpu_of(transport(), url, arguments.calls, arguments.in_flight)))
                print(f"{way}: {times[way][-1] * 1e3:.2f} ms", file=sys.stderr, flush=True)
    finally:
        server.terminate()
        server.join()

    best = {way: min(taken) for way, taken in times.items()}
    for way, seconds in best.items():
        print(f"{way:14} {version(way):8} {seconds * 1e3:6.2f} ms of CPU a call")
    print(f"httpx / httpx-aiohttp: {best['httpx'] / best['httpx-aiohttp']:.2f}")
    print(json.dumps({"in_flight": arguments.in_flight, "cpu_seconds": best, "aiohttp": version("aiohttp")}))


if __name__ == "__main__":
    main()
