"""Search over HTTP: whatever a server sends is a result, a failed call or a truncated episode, and never a crash."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import stamina

import srpo_env
from srpo_env import cli
from srpo_env.agents.scripted import ScriptedPolicy
from srpo_env.errors import InvalidInput, ToolUnavailable
from srpo_env.registry import load
from srpo_env.testing import check_tool
from srpo_env.tools import HttpSearch, Passage, SearchIndex, SearchTool, retriever_app

OSLO = Passage("7", "Oslo", "Rain falls in Oslo.", 0.0)
INDEX = SearchIndex([OSLO, Passage("8", "Bergen", "Rain falls, and falls."), Passage("9", "", "Snow.")])

Reply = tuple[int, bytes]


class Server:
    """Sends what it is told to, one reply a request, the last one over and over."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.asked: list[Any] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status, body = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/retrieve"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _at_once() -> Iterator[None]:
    """Attempts follow each other without a wait."""
    stamina.set_testing(True, attempts=3)
    yield
    stamina.set_testing(False)


def said(result: Any) -> Reply:
    return 200, json.dumps({"result": result}).encode()


def document(text: str, **more: Any) -> dict[str, Any]:
    return {"document": {"id": "7", "contents": text}, "score": 1.5, **more}


def ask(tool: HttpSearch, query: str = "rain") -> str:
    return asyncio.run(tool(query=query))


def test_it_asks_in_the_protocol(server: Server) -> None:
    server.replies = [said([[]])]
    ask(HttpSearch(server.url, top_k=5), "rain in Oslo")
    assert server.asked == [{"queries": ["rain in Oslo"], "topk": 5, "return_scores": True}]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (document('"Oslo"\nRain falls.'), "[1] Oslo\nRain falls."),
        (document("Oslo\nRain\nfalls."), "[1] Oslo\nRain\nfalls."),
        (document("Rain falls."), "[1] Rain falls."),
        (document("Oslo\nRain.", score="0.7"), "[1] Oslo\nRain."),
        ({"id": 3, "contents": "Oslo\nRain."}, "[1] Oslo\nRain."),
        ({"title": "Oslo", "text": "Rain."}, "[1] Oslo\nRain."),
        ({"document": {"text": "Rain."}, "score": None}, "[1] Rain."),
    ],
)
def test_documents_are_read_in_each_form_that_servers_send(server: Server, found: Any, text: str) -> None:
    server.replies = [said([[found]])]
    assert ask(HttpSearch(server.url)) == text


@pytest.mark.parametrize("result", [[[]], []])
def test_nothing_found_is_a_result(server: Server, result: Any) -> None:  # B096
    server.replies = [said(result)]
    assert ask(HttpSearch(server.url)) == "No results."


def test_fewer_than_asked_for_are_given_in_order_and_more_are_left_out(server: Server) -> None:
    server.replies = [said([[document(text) for text in "abcd"]])]
    assert ask(HttpSearch(server.url, top_k=5)) == "[1] a\n\n[2] b\n\n[3] c\n\n[4] d"
    assert ask(HttpSearch(server.url, top_k=2)) == "[1] a\n\n[2] b"


def test_a_passage_of_a_megabyte_is_cut_and_says_so(server: Server) -> None:
    server.replies = [said([[document("Long\n" + "x" * 10**6)]])]
    assert ask(HttpSearch(server.url, max_chars=4)) == "[1] Long\nxxxx [... 999996 characters cut]"


MALFORMED = {
    "no result": (200, b"{}"),
    "no JSON": (200, b"<html>busy</html>"),
    "half a body": (200, b'{"result": [[{"doc'),
    "a list": (200, b"[]"),
    "no text": said([[{"document": {"id": "1"}, "score": 1.0}]]),
    "text that is none": said([[{"document": {"text": 5}, "score": 1.0}]]),
    "documents that are none": said([["Oslo"]]),
    "no list": said(5),
    "bytes": (200, b"\xff\xfe\x00"),
    "an error": (500, b"oops"),
    "too many requests": (429, b""),
}


@pytest.mark.parametrize("reply", MALFORMED.values(), ids=MALFORMED)
def test_a_reply_that_is_none_is_tried_again(server: Server, reply: Reply) -> None:
    server.replies = [reply, reply, said([[document("Oslo\nRain.")]])]
    assert ask(HttpSearch(server.url)) == "[1] Oslo\nRain."
    assert len(server.asked) == 3


@pytest.mark.parametrize("reply", MALFORMED.values(), ids=MALFORMED)
def test_a_server_that_never_gives_one_is_unavailable(server: Server, reply: Reply) -> None:
    server.replies = [reply]
    with pytest.raises(ToolUnavailable, match=r"retriever at http://127\.0\.0\.1:\d+/retrieve is unavailable"):
        ask(HttpSearch(server.url))
    assert len(server.asked) == 3


def test_a_request_that_the_server_refuses_is_not_sent_again(server: Server) -> None:
    server.replies = [(404, b"")]
    with pytest.raises(ToolUnavailable, match="404"):
        ask(HttpSearch(server.url))
    assert len(server.asked) == 1


@pytest.fixture
def nobody(server: Server) -> str:
    """An address where nothing listens any more."""
    server.replies = [(200, b"")]
    return server.url.replace("127.0.0.1", "127.0.0.2")


def test_a_dead_retriever_truncates_the_episode_and_scores_nobody(nobody: str) -> None:
    policy = ScriptedPolicy(["<search>rain</search>"])
    log = srpo_env.rollout(
        "search_aggregator", policies=policy, episodes=2, group_size=2, tools={"search": HttpSearch(nobody)}
    )
    events = list(log)
    assert [(each.step, each.truncated_by, each.reward, each.score_reason) for each in events] == [
        (0, "tool_unavailable", None, "tool unavailable")
    ] * 2
    calls = [call for event in events for member in event.members for call in member.tool_calls]
    assert calls
    assert all(call.unavailable and not call.ok and "is unavailable" in call.result for call in calls)


def test_the_tool_conforms(server: Server) -> None:
    server.replies = [said([[document("Oslo\nRain.")]])]
    check_tool(HttpSearch(server.url), {"query": "rain"})


def test_it_works_in_one_event_loop_after_another(server: Server) -> None:
    server.replies = [said([[document("Oslo\nRain.")]])]
    tool = HttpSearch(server.url)
    assert ask(tool) == ask(tool)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, "tools.search.url: this setting is missing"),
        ({"url": "127.0.0.1:8000"}, "tools.search.url: '127.0.0.1:8000' is not allowed"),
        ({"url": "http://x", "topk": 3}, "tools.search.topk: no such setting. Did you mean 'top_k'?"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidInput, match=error):
        load("tool", "http").from_config("search", settings)


# Our own server.


@pytest.fixture
def asked() -> Callable[[Any], httpx.Response]:
    def post(body: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(retriever_app(INDEX, top_k=1))
            async with httpx.AsyncClient(transport=transport, base_url="http://retriever") as client:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                return await client.post("/retrieve", content=content)

        return asyncio.run(send())

    return post


def test_the_server_answers_each_query_with_documents_and_scores(asked: Callable[[Any], httpx.Response]) -> None:
    reply = asked({"queries": ["Oslo", "falls", "nothing"], "topk": 2, "return_scores": True}).json()
    assert [[each["document"]["id"] for each in found] for found in reply["result"]] == [["7"], ["8", "7"], []]
    assert reply["result"][0][0]["document"]["contents"] == '"Oslo"\nRain falls in Oslo.'
    assert reply["result"][0][0]["score"] == pytest.approx(INDEX.search("Oslo")[0].score)


def test_without_scores_the_documents_stand_alone_and_without_topk_there_are_as_many_as_the_server_says(
    asked: Callable[[Any], httpx.Response],
) -> None:
    assert [[each["id"] for each in found] for found in asked({"queries": ["falls"]}).json()["result"]] == [["8"]]


@pytest.mark.parametrize(
    "body", [{}, {"queries": "rain"}, {"queries": ["rain"], "topk": 0}, {"queries": ["x"] * 1025}, [], b"{", b"\xff"]
)
def test_a_request_that_is_none_is_told_what_is_wrong(asked: Callable[[Any], httpx.Response], body: Any) -> None:
    reply = asked(body)
    assert reply.status_code == 422
    assert reply.json()["error"]


def test_the_command_serves_a_corpus_until_it_is_interrupted(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "7", "title": "Oslo", "text": "Rain falls."}', encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "srpo_env.cli", "serve", "retriever", f"corpus={corpus}", f"port={port}"]
    environment = os.environ | {"SRPO_ENV_CACHE": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, text=True) as serving:
        assert serving.stderr is not None
        said = ""
        while "running on" not in said.lower():
            line = serving.stderr.readline()
            assert line, said
            said += line
        try:
            assert ask(HttpSearch(f"http://127.0.0.1:{port}/retrieve"), "Oslo") == "[1] Oslo\nRain falls."
        finally:
            serving.send_signal(signal.SIGINT)
            serving.communicate(timeout=30)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["serve", "retriever"], "serve retriever.corpus: this setting is missing"),
        (["serve", "retriever", "corpus=none.jsonl"], "corpus 'none.jsonl' can't be read"),
        (["serve", "retriver", "corpus=none.jsonl"], "Did you mean 'retriever'?"),
        (["serve", "retriever", "corpus"], "has the form key=value"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    assert error in capsys.readouterr().err


def test_what_our_server_finds_our_tool_shows_as_the_index_in_process_does(server: Server, asked: Any) -> None:
    body = {"queries": ["rain falls"], "topk": 2, "return_scores": True}
    server.replies = [(200, asked(body).content)]
    found = ask(HttpSearch(server.url, top_k=2), "rain falls")
    assert found == asyncio.run(SearchTool(INDEX, top_k=2)(query="rain falls"))
