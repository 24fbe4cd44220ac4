r"""Search over HTTP: the client and the server of the `/retrieve` protocol that Search-R1-style retrievers speak.

    POST /retrieve   {"queries": ["rain in Oslo"], "topk": 3, "return_scores": true}
    reply            {"result": [[{"document": {"id": "1", "contents": "Oslo\nRain falls."}, "score": 1.2}]]}

One list of documents for each query, best first; the first line of `contents` is the title. Without scores, the lists
hold the documents themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakKeyDictionary

import httpx
import stamina
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from srpo_env.errors import MissingExtra, ToolUnavailable
from srpo_env.settings import checked
from srpo_env.tools.search import Passage, Search, SearchIndex

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger("srpo_env")

_MOST_IN_FLIGHT = 64
_SHOWN = 200


class HttpSearchSettings(BaseModel):
    """Settings of the tool `http`.

    Attributes:
        url: Where the retriever answers, such as http://127.0.0.1:8000/retrieve.
        top_k: Most passages of a result.
        max_chars: Longest text of a passage in a result; what is cut is counted.
        timeout_s: Longest time of one attempt.
        attempts: Most attempts of a query.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(pattern="^https?://")
    top_k: int = Field(3, ge=1, le=100)
    max_chars: int = Field(2000, ge=1)
    timeout_s: float = Field(30.0, gt=0)
    attempts: int = Field(4, ge=1)


class HttpSearch(Search):
    """Search by a server that speaks the `/retrieve` protocol, as a tool.

    A server that stays silent, fails or sends something else is tried again; then the tool is unavailable: the episode
    is truncated and not scored, since the agent can't help it.

    Args:
        url, top_k, max_chars, timeout_s, attempts: See `HttpSearchSettings`.
        name: What agents call it by.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "search",
        top_k: int = 3,
        max_chars: int = 2000,
        timeout_s: float = 30.0,
        attempts: int = 4,
    ) -> None:
        super().__init__(name, top_k, max_chars)
        self.url, self.timeout_s, self.attempts = url, timeout_s, attempts
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Client] = WeakKeyDictionary()

    @classmethod
    def from_config(cls, name: str, settings: Mapping[str, Any]) -> HttpSearch:
        """Returns the tool that a recipe describes; nothing is sent.

        Raises:
            InvalidInput: A key is unknown or missing, or a value breaks a rule.
        """
        return cls(name=name, **dict(checked(HttpSearchSettings, f"tools.{name}", settings)))

    async def find(self, query: str) -> Sequence[Passage]:
        """Returns what the server finds, best first.

        Raises:
            ToolUnavailable: It could not be asked, or did not answer in the protocol.
        """
        client = self._clients.setdefault(asyncio.get_running_loop(), _Client(self.timeout_s))
        body = {"queries": [query], "topk": self.top_k, "return_scores": True}
        try:
            async for attempt in stamina.retry_context(on=_may_pass, attempts=self.attempts, timeout=None):
                with attempt:
                    return _passages(await client.post(self.url, body))[: self.top_k]
        except (httpx.HTTPError, httpx.InvalidURL, _BadReply) as error:
            said = str(error).splitlines()[0][:_SHOWN] if str(error) else type(error).__name__
            logger.warning("%s: the retriever at %s is unavailable: %s", self.name, self.url, said)
            raise ToolUnavailable(
                f"{self.name}: the retriever at {self.url} is unavailable ({said}). Is it running? "
                "`srpo-env serve retriever corpus=...` starts one."
            ) from error
        raise AssertionError("stamina ends by an error")


class _Client:
    """The connections of one event loop, and a limit on queries in flight: waiting for one's turn is no time-out."""

    def __init__(self, timeout_s: float) -> None:
        self._turns = asyncio.Semaphore(_MOST_IN_FLIGHT)
        # No connection outlives its query: a tool is never told that it is done with.
        limits = httpx.Limits(max_connections=_MOST_IN_FLIGHT, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, pool=None), limits=limits)

    async def post(self, url: str, body: Mapping[str, Any]) -> httpx.Response:
        async with self._turns:
            return (await self._client.post(url, json=body)).raise_for_status()


class _BadReply(Exception):
    """A reply that is not in the protocol."""


def _may_pass(error: Exception) -> bool:
    """Whether trying again may help: not where the server says that the request itself is wrong."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in (408, 429) or error.response.is_server_error
    return isinstance(error, httpx.TransportError | _BadReply)


def _passages(reply: httpx.Response) -> list[Passage]:
    """The passages that a reply has for its only query; none where it found nothing."""
    try:
        lists = reply.json()["result"]
        found = lists[0] if lists else []
        return [_passage(each) for each in found]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _BadReply(f"the reply is not in the /retrieve protocol: {reply.text[:80]!r}") from error


def _passage(found: Mapping[str, Any]) -> Passage:
    document, score = found.get("document", found), float(found.get("score") or 0.0)
    if "contents" in document:
        title, _, text = document["contents"].partition("\n")
        title, text = (title.strip().strip('"'), text) if text else ("", title)
    else:
        title, text = document.get("title") or "", document["text"]
    if not isinstance(text, str) or not isinstance(title, str):
        raise TypeError("a document's text is no text")
    return Passage(str(document.get("id", "")), title, text, score)


# The server.


class RetrieverSettings(BaseModel):
    """Settings of `srpo-env serve retriever`.

    Attributes:
        corpus: JSON Lines with rows of `id, title, text`.
        top_k: Passages for a request that does not say how many.
        host, port: Where it listens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    corpus: str
    top_k: int = Field(3, ge=1, le=100)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)


class _Request(BaseModel):
    queries: Annotated[list[str], Field(max_length=1024)]
    topk: Annotated[int, Field(ge=1, le=100)] | None = None
    return_scores: bool = False


def retriever_app(index: SearchIndex, top_k: int = 3) -> Starlette:
    """Returns the ASGI application that answers `/retrieve` from an index, and `/health`.

    Args:
        index: What is searched.
        top_k: Passages for a request that does not say how many.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    def answers(asked: _Request) -> list[list[dict[str, Any]]]:
        found = [index.search(query, asked.topk or top_k) for query in asked.queries]
        return [[_document(each, with_score=asked.return_scores) for each in passages] for passages in found]

    async def retrieve(request: Request) -> Response:
        try:
            asked = _Request.model_validate_json(await request.body())
        except ValidationError as error:
            problems = [{"where": list(each["loc"]), "problem": each["msg"]} for each in error.errors()]
            return JSONResponse({"error": problems}, status_code=422)
        return JSONResponse({"result": await run_in_threadpool(answers, asked)})

    async def health(request: Request) -> Response:
        return JSONResponse({"passages": len(index)})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


def _document(passage: Passage, *, with_score: bool) -> dict[str, Any]:
    document = {"id": passage.id, "title": passage.title, "text": passage.text}
    document["contents"] = f'"{passage.title}"\n{passage.text}'
    return {"document": document, "score": passage.score} if with_score else document


def serve_retriever(settings: Mapping[str, Any]) -> None:
    """Serves a corpus until it is interrupted: `srpo-env serve retriever corpus=corpus.jsonl port=8000`.

    Raises:
        InvalidInput: A key is unknown or missing, a value breaks a rule, or the corpus can't be read.
        MissingExtra: The extra `serve` is not installed.
    """
    values = checked(RetrieverSettings, "serve retriever", settings)
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"serving needs the package {error.name!r}, which is not installed; run `pip install 'srpo-env[serve]'`."
        ) from error
    index = SearchIndex.load(values.corpus)
    uvicorn.run(retriever_app(index, values.top_k), host=values.host, port=values.port, log_level="info")
