"""A server that speaks vLLM's protocol on loopback, from a thread of its own, with faults on request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

Json = dict[str, Any]
Reply = tuple[int, dict[str, str], Any]
"""Status, headers, and a body that becomes JSON unless it is bytes."""


@dataclass
class Call:
    """A call that came in: its path, its body, and the headers."""

    path: str
    body: Any
    headers: dict[str, str]


def fixed(logits: Mapping[int, float], end: int) -> Callable[..., tuple[list[int], list[float]]]:
    """Draws every token from the same logits, until `end`."""

    def draw(prompt: Sequence[int], temperature: float, max_tokens: int, seed: int) -> tuple[list[int], list[float]]:
        del prompt
        rng, ids, logprobs = random.Random(seed), list[int](), list[float]()
        scaled = {token: logit / (temperature or 1.0) for token, logit in logits.items()}
        total = math.log(sum(map(math.exp, scaled.values())))
        while len(ids) < max_tokens and end not in ids:
            token = rng.choices(list(scaled), [math.exp(each) for each in scaled.values()])[0]
            ids.append(token)
            logprobs.append(scaled[token] - total)
        return ids, logprobs

    return draw


@dataclass
class FakeServer:
    """A vLLM-like server; `with FakeServer(...) as server:` serves at `server.url`.

    Attributes:
        draw: Samples ids and log-probs for (prompt, temperature, max_tokens, seed).
        decode: The text of ids.
        name, context_length: The model of /v1/models.
        others: Its further entries.
        raw: Whether log-probs are from before the temperature.
        gives_ids: Whether it understands `return_token_ids`.
        dev: Whether it has the endpoints for new weights.
        workers: What it says of its workers.
        weights: What it calls its weights.
        tokenize: Encodes a text; None: it has no such endpoint.
        answers: Replies to paths other than those of completions, in place of its own.
        fault: Called with a completion's number and body; names what goes wrong with it, or gives another reply.
        on_call: Called with every call, before it is answered.
        asked: Set once a completion, and no probe, has come in.
        released: Set by a test: replies with the fault `hold` wait for it.
        disconnected: Set where the other side gave up on a reply with the fault `stall`.
    """

    draw: Callable[..., tuple[list[int], list[float]]]
    decode: Callable[[Sequence[int]], str] = str
    name: str = "fake"
    context_length: int | None = 128
    others: Sequence[Json] = ()
    raw: bool = False
    gives_ids: bool = True
    dev: bool = True
    workers: int = 1
    weights: str = "default"
    tokenize: Callable[[str], list[int]] | None = None
    answers: dict[str, Reply] = field(default_factory=dict)
    fault: Callable[[int, Json], str | Reply | None] = lambda number, body: None
    on_call: Callable[[Call], None] = lambda call: None
    calls: list[Call] = field(default_factory=list)
    most_at_once: int = 0
    asked: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    disconnected: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def __enter__(self) -> Self:
        self._at_once = self._completions = 0
        self._connections: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, port: int = 0) -> None:
        """Begins to listen."""
        starting = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", port, backlog=1024), self._loop
        )
        self._server = starting.result()
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def stop(self) -> None:
        """Stops listening, and resets all connections."""

        async def stop() -> None:
            self._server.close()
            for connection in list(self._connections):
                connection.transport.abort()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()

    def bodies(self, path: str = "/v1/completions") -> list[Json]:
        """Bodies of the calls to a path, without the two of the probe."""
        return [each.body for each in self.calls if each.path == path and each.body.get("logprobs") != 1]

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    await self._answer(reader, writer)
        finally:
            self._connections.discard(writer)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in head[1:] if line)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        call = Call(head[0].split()[1], json.loads(content) if content else None, headers)
        self.calls.append(call)
        if call.path.endswith("completions") and call.body.get("logprobs") != 1:
            self.asked.set()
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self.on_call(call)
            await self._reply(call, reader, writer)
        finally:
            self._at_once -= 1

    async def _reply(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault: str | Reply | None = self.answers.get(call.path)
        if call.path.endswith("/completions"):
            self._completions += 1
            fault = self.fault(self._completions - 1, call.body)
        status, headers, body = fault if isinstance(fault, tuple) else (200, {}, self._body(call))
        if not 0 <= (call.body or {}).get("temperature", 0) <= 2:
            status, body = 400, {"message": "temperature must be in [0, 2]"}
        if body is None:
            status, body = 404, {"detail": "Not Found"}
        if isinstance(fault, str):
            status, headers, body = _spoilt(fault, body)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(content)}", *(f"{k}: {v}" for k, v in headers.items())]
        whole = "\r\n".join([*lines, "", ""]).encode() + content
        if fault == "slow":
            await asyncio.sleep(0.05)
        if fault == "hold":
            await asyncio.to_thread(self.released.wait)
        if fault == "stall":
            await reader.read()  # until the other side gives up
            self.disconnected.set()
            raise ConnectionError
        if fault == "reset":
            raise ConnectionError
        if fault == "cut":
            writer.write(whole[: len(whole) - len(content) // 2])
            await writer.drain()
            raise ConnectionError
        if fault == "no HTTP":
            whole = b"\xff\x00 nonsense\r\n\r\n"
        writer.write(whole * 2 if fault == "twice" else whole)
        await writer.drain()

    def _body(self, call: Call) -> Any:
        body = call.body
        if call.path == "/v1/models":
            return {"data": [{"id": self.name, "max_model_len": self.context_length, "parent": None}, *self.others]}
        if call.path == "/v1/completions":
            return {"id": "1", "choices": [self._choice(body)]}
        if call.path == "/v1/chat/completions":
            ids, _ = self.draw([], body["temperature"], body["max_tokens"], body["seed"])
            message = {"role": "assistant", "content": self.decode(ids)}
            return {"id": "1", "choices": [{"message": message, "finish_reason": "stop"}]}
        if call.path == "/tokenize":
            return self.tokenize and {"tokens": self.tokenize(body["prompt"])}
        if not self.dev:
            return None
        if call.path == "/update_weight_version":
            self.weights = body["new_version"]
        return {"weight_version": self.weights, "world_size": self.workers}

    def _choice(self, body: Json) -> Json:
        prompt, temperature = body["prompt"], body["temperature"]
        told = 1.0 if self.raw else temperature
        ids, logprobs = self.draw(prompt, temperature, body["max_tokens"], body["seed"])
        if self.raw:
            logprobs = [each * 0.9 for each in logprobs]
        choice: Json = {
            "text": self.decode(ids),
            "logprobs": {"token_logprobs": logprobs, "top_logprobs": [{"a": -1.0 / told, "b": -5.0}]},
            "finish_reason": "length" if len(ids) == body["max_tokens"] else "stop",
        }
        if self.gives_ids and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        return choice


MISSING = ("text", "token_ids", "prompt_token_ids", "logprobs", "finish_reason")


def _spoilt(fault: str, body: Any) -> Reply:
    """A reply with a fault."""
    choice = body["choices"][0]
    content = json.dumps(body).encode()
    match fault.split():
        case ["429"]:
            return 429, {"Retry-After": "0.01"}, {"error": {"message": "slow down"}}
        case [("500" | "502" | "503" | "408") as status]:
            return int(status), {}, {"error": {"message": "engine dead"}}
        case ["half"]:
            return 200, {}, content[: len(content) // 2]
        case ["bytes"]:
            return 200, {}, content.replace(b'"text"', b'"\xff\xfe"')
        case ["missing", key]:
            return 200, {}, {"choices": [{k: v for k, v in choice.items() if k != key}]}
        case ["null", key]:
            return 200, {}, {"choices": [{**choice, key: None}]}
        case ["fewer"]:
            return 200, {}, {"choices": [{**choice, "token_ids": choice["token_ids"][:-1]}]}
        case ["other", "prompt"]:
            return 200, {}, {"choices": [{**choice, "prompt_token_ids": [1]}]}
        case ["duplicate"]:
            return 200, {}, {"choices": [choice, choice]}
        case ["repeated"]:
            return 200, {}, content * 2
        case ["NaN" | "-inf" | "1.0" as logprob]:
            logprobs = [float(logprob)] * len(choice["token_ids"])
            return 200, {}, {"choices": [{**choice, "logprobs": {"token_logprobs": logprobs}}]}
    return 200, {}, body


class Weights:
    """Samples a transformers model, one token after the other; `load` takes new weights as vLLM would."""

    def __init__(self, folder: Path, end: int) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self._end = end

    def load(self, folder: Path) -> None:
        """Takes a folder's weights into the model as it is."""
        from safetensors.torch import load_file

        self.model.load_state_dict(load_file(folder / "model.safetensors"))

    def __call__(
        self, prompt: Sequence[int], temperature: float, max_tokens: int, seed: int
    ) -> tuple[list[int], list[float]]:
        """Draws an output."""
        import torch

        generator, ids, logprobs = torch.Generator().manual_seed(seed), list(prompt), list[float]()
        with torch.no_grad():
            while len(logprobs) < max_tokens and (not logprobs or ids[-1] != self._end):
                row = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1].float() / temperature, -1)
                ids.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
                logprobs.append(float(row[ids[-1]]))
        return ids[len(prompt) :], logprobs
