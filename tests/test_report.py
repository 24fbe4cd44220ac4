"""Does the report show what happened, whole and safely, whatever the run holds?"""

import html.parser
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from srpo_env.errors import InvalidInput
from srpo_env.eventlog import EventLog
from srpo_env.records import Event, Member, Message, Output, Parse, Sampling, ToolCall
from srpo_env.report import write_report

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "</pre></div></body><h1>gone</h1>",
    "<think>text</think>",
    '" onmouseover="alert(1)',
    "{{ 7 * 7 }} {% raw %} &amp; &lt;b&gt;",
    "<!-- ]]> <svg onload=alert(1)>",
]
RECIPE = """\
srpo_env: 1
description: Three proposers and a majority vote learn two-digit addition.
workflow: {use: tiny/parallel_proposers, params: {proposers: 3}}
tasks: {train: {use: arithmetic}, eval: {use: arithmetic, split: test}}
policies: {main: {model: tiny_arithmetic, train: {lr: 1.5e-4}}, judge: {model: frozen}}
trainer: srpo
eval: {baseline: tiny/single_agent}
seed: 7
updates: 80
"""
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(html.parser.HTMLParser):
    """What a browser would make of a page: the elements with their attributes, the text, and whether all are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.text += " "
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.text += " "
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "title"):
            self.text += data


def member(index: int, text: str, *, agent: str = "proposer", value: Any = None, **changes: Any) -> Member:
    fields: dict[str, Any] = {
        "agent": agent,
        "index": index,
        "turn": 0,
        "policy": "main",
        "messages": (Message(role="user", content="12+34="),),
        "sampling": Sampling(max_tokens=6),
        "output": Output(text=text, output_ids=tuple(range(len(text[:6]) + 1)), finish_reason="stop"),
        "parse": Parse(ok=value is not None, value=value, error=None if value is not None else "no number"),
    }
    return Member(**(fields | changes))


def event(batch: str, episode: str, members: tuple[Member, ...], reward: float | None, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "run": "r",
        "batch": batch,
        "task": "12+34",
        "group": f"{batch}.12+34",
        "episode": episode,
        "step": 0,
        "node": "propose",
        "visit": 0,
        "members": members,
        "next_node": "end",
        "state_before": "a",
        "state_after": "b",
        "reward": reward,
        "score_reason": "right" if reward else "wrong",
        "answer": "46",
        "terminated": True,
        "truncated": False,
        "started": 1_796_000_000.0,
        "ended": 1_796_000_001.0,
    }
    return Event(**(fields | changes))


def log_batch(log: EventLog, batch: str, texts: list[str], *, sizes: tuple[int, ...] = (3,)) -> None:
    for at, text in enumerate(texts):
        size = sizes[at % len(sizes)]
        members = tuple(member(index, text, value=text if index else None) for index in range(size))
        log.append(event(batch, f"{batch}.{at}", members, float(at % 2)))


def write_metrics(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def evaluation(update: int, workflow: str, accuracy: float | None, **more: Any) -> dict[str, Any]:
    interval = None if accuracy is None else [accuracy - 0.03, accuracy + 0.03]
    return {
        "kind": "eval",
        "update": update,
        "workflow": workflow,
        "avg_at_k": accuracy,
        "avg_at_k_interval": interval,
        "tasks": 1024,
        **more,
    }


def metrics_of(update: int, total: int, draw: random.Random) -> dict[str, float]:
    done = update / total
    return {
        "loss": draw.gauss(0, 0.02),
        "grad_norm": 0.5 + draw.random() / 3,
        "clip_fraction_low_off_policy": 0.05 + 0.02 * draw.random(),
        "clip_fraction_high_off_policy": 0.08 + 0.05 * draw.random(),
        "clip_fraction_high/K=3": 0.1,
        "approx_kl": 0.01 * draw.random(),
        "entropy": 1.2 - 0.9 * done + 0.05 * draw.random(),
        "reward_mean": 0.4 + 0.5 * done + draw.gauss(0, 0.05),
        "groups_without_signal": 0.1 + 0.5 * done + 0.05 * draw.random(),
        "output_tokens/agent=proposer": 3.2,
        "truncation_rate/agent=proposer": 0.01 * draw.random(),
        "parse_failure_rate/agent=proposer": 0.04 * (1 - done),
        "seconds_sampling": 0.5 + 0.1 * draw.random(),
        "seconds_logprobs": 0.08,
        "seconds_update": 0.3,
        "lr": 1.5e-4,
        "set_size_mean": 3.0,
    }


def trained_run(folder: Path, *, updates: int = 80, finished: bool = True, texts: list[str] | None = None) -> Path:
    """A run folder as `train` leaves it, by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(RECIPE)
    about = {"recipe": "arithmetic_tiny", "started": 1_796_000_000.0, "versions": {"torch": "2.13.0"}}
    (folder / "run.json").write_text(json.dumps(about))
    draw = random.Random(0)
    lines = [evaluation(0, "team", 0.41), evaluation(0, "baseline", 0.36)]
    lines += [{"kind": "update", "update": n, "metrics": metrics_of(n, 80, draw)} for n in range(1, updates + 1)]
    if finished:
        lines += [evaluation(updates, "team", 0.88), evaluation(updates, "baseline", 0.81)]
        lines.append(
            {"kind": "result", "update": updates, "seconds": 171.2, "gain": 0.45, "gain_interval": [0.421, 0.479]}
        )
    write_metrics(folder, lines)
    with EventLog.writing(folder) as log:
        log_batch(log, "eval-0", ["46"] * 4)
        for number in sorted({1, updates // 2, updates} - {0}):
            log_batch(log, f"update-{number}", texts or ["46", "45", "the answer is 46", "4 6"], sizes=(3, 3, 1, 2))
    return folder


def page_of(folder: Path) -> tuple[str, Page]:
    text = write_report(folder).read_text(encoding="utf-8")
    return text, Page(text)


# Safety: whatever a model wrote is text.


def hostile_event(text: str, *, episode: str = "e") -> Event:
    call = ToolCall(tool="search", arguments={text: text}, result=text)
    members = (
        member(0, text, agent=text or "agent", value=text, tool_calls=(call,), policy=text or "main"),
        member(1, text, agent=text or "agent", messages=(Message(role="system", content=text),), error=None),
        member(2, "", agent="third", error=text),
    )
    return event(
        "update-1", episode, members, None, task=text or "t", node=text, value=text, answer=text, score_reason=text
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_model_text_is_shown_literally_and_never_becomes_markup(text: str, tmp_path: Path) -> None:
    with EventLog.writing(tmp_path) as log:
        log.append(hostile_event(text))
    (tmp_path / "config.yaml").write_text(f"description: {json.dumps(text)}\nworkflow: {json.dumps(text)}\nseed: 1\n")
    (tmp_path / "run.json").write_text(json.dumps({"recipe": text, "versions": {text: text}}))
    numbers = {
        "kind": "update",
        "update": 1,
        "metrics": {f"reward_mean/{text}": 1.0, f"output_tokens/agent={text}": 2.0},
    }
    write_metrics(tmp_path, [numbers, evaluation(0, text, 0.5), evaluation(1, text, 0.6, **{text: text})])
    source, page = page_of(tmp_path)
    assert_safe(source, page)
    assert page.text.count(text) >= 10


def assert_safe(source: str, page: Page) -> None:
    """No element that the template does not have, no script, no event handler, nothing fetched, all closed."""
    assert page.wrong == []
    assert page.open == []
    tags = {tag for tag, _ in page.elements}
    assert tags.isdisjoint({"script", "img", "iframe", "object", "embed", "link", "base", "form", "think"})
    assert tags.isdisjoint({"a", "audio", "video", "image", "foreignobject"})
    assert [tag for tag, _ in page.elements if tag == "body"] == ["body"]
    for tag, attributes in page.elements:
        assert [name for name in attributes if name.startswith("on") or name == "src"] == [], tag
        assert (attributes.get("href") or "#").startswith("#")
    assert re.findall(r"https?://|@import|url\((?!#)", re.sub(r"&[#\w]+;", "", source)) == []


def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    source, page = page_of(trained_run(tmp_path))
    assert source.lstrip().startswith("<!doctype html>")
    assert_safe(source, page)
    identities = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identities) == len(set(identities))
    targets = set(re.findall(r'(?:href="|url\()#([^")]+)', source))
    assert targets <= set(identities)
    assert len(source) < 400_000


def test_long_and_unprintable_text_is_cut_and_made_visible(tmp_path: Path) -> None:
    with EventLog.writing(tmp_path) as log:
        log.append(event("", "e", (member(0, "a\x00\x1b[2J\ud800" + "x" * 100_000, value="v" * 10_000),), 1.0))
    source, page = page_of(tmp_path)
    assert "a␀␛[2J�" in page.text
    assert "96,0" in page.text
    assert "more characters" in page.text
    assert len(source) < 60_000


# What it says.


def test_a_trained_run_shows_the_gain_the_curves_and_the_sets(tmp_path: Path) -> None:
    _, page = page_of(trained_run(tmp_path / "arithmetic_tiny-1"))
    text = " ".join(page.text.split())
    assert "arithmetic_tiny 80 updates" in text
    assert "seed 7" in text
    assert "2026-11-" in text
    assert "Single output 1,024 tasks +0.450 [+0.421, +0.479] before 0.360 0.330 to 0.390" in text
    assert "after 80 updates 0.810 0.780 to 0.840" in text
    assert "Team 1,024 tasks +0.470 before 0.410 0.380 to 0.440 after 80 updates 0.880" in text
    for title in (
        "Accuracy on held-out tasks",
        "Reward",
        "Clip fraction",
        "Approximate KL",
        "Entropy",
        "Gradient norm",
    ):
        assert title in text
    for title in ("Groups without signal", "Output length", "Seconds of an update", "Size of the active sets"):
        assert title in text
    assert len([tag for tag, attributes in page.elements if tag == "svg" and attributes.get("role") == "img"]) == 12
    assert "clip_fraction_high/K=3" in text
    assert "tiny/parallel_proposers, params: {proposers: 3}" in text
    assert "torch 2.13.0" in text


def test_a_run_with_a_router_shows_the_size_of_the_routed_sets(tmp_path: Path) -> None:
    lines = [{"kind": "update", "update": n, "metrics": {"set_size_without_routers": 5 - n / 2}} for n in (1, 2, 3)]
    write_metrics(tmp_path, [*lines, evaluation(3, "team", 0.8) | {"set": "operations 2", "members": 5.625}])
    text = " ".join(page_of(tmp_path)[1].text.split())
    assert "Size of the routed sets" in text
    assert "team on operations 2" in text
    assert "5.625" in text


def test_set_sizes_are_counted_from_the_trained_events(tmp_path: Path) -> None:
    """Of three members one is frozen and one has no output: K = 1. Evaluations don't count beside training."""
    (tmp_path / "config.yaml").write_text(RECIPE)
    members = (member(0, "46"), member(0, "46", policy="judge"), member(1, "", error="no room"))
    with EventLog.writing(tmp_path) as log:
        log.append(event("update-1", "a", members, 1.0))
        log.append(event("update-1", "b", (member(0, "46"), member(1, "46")), 1.0))
        log_batch(log, "eval-0", ["46"] * 10)
    _, page = page_of(tmp_path)
    text = " ".join(page.text.split())
    assert "1.50 mean set size K" in text
    assert "50% sets with K > 1" in text


def test_the_best_and_the_worst_episode_of_the_last_batch_are_shown(tmp_path: Path) -> None:
    with EventLog.writing(tmp_path) as log:
        for number in (1, 2, 10, 9):  # 9 is the last in the file, 10 the last update
            for at in range(5):
                text = f"said in {number}, {at}"
                log.append(event(f"update-{number}", f"{number}.{at}", (member(0, text),), at / 4))
            log.append(
                event(f"update-{number}", f"{number}.x", (member(0, "cut"),), 0.0, terminated=False, next_node="v")
            )
    write_metrics(tmp_path, [{"kind": "update", "update": 10, "metrics": {}}])
    _, page = page_of(tmp_path)
    text = " ".join(page.text.split())
    assert (
        text.index("Update 1 at random")
        < text.index("Update 10 best reward 1")
        < text.index("Update 10 worst reward 0")
    )
    assert "said in 10, 4" in text
    assert "said in 10, 0" in text
    assert "said in 9" not in text
    assert "cut" not in text


def test_an_unscored_and_a_truncated_episode_are_called_so(tmp_path: Path) -> None:
    ended = {"terminated": False, "truncated": True, "truncated_by": "steps", "answer": None}
    with EventLog.writing(tmp_path) as log:
        log.append(event("", "a", (member(0, "46"),), None, score_reason="no reference", **ended))
    text = " ".join(page_of(tmp_path)[1].text.split())
    assert "unscored (no reference)" in text
    assert "cut off: steps" in text
    assert "1 unscored episodes" in text
    assert "answer null" in text


# Odd runs.


def test_an_interrupted_run_says_where_it_stopped(tmp_path: Path) -> None:
    text = " ".join(page_of(trained_run(tmp_path, updates=37, finished=False))[1].text.split())
    assert "stopped after 37 of 80 updates" in text
    assert "0.360 0.330 to 0.390" in text
    assert "Not measured again" in text
    assert "Reward" in text


def test_a_run_that_was_stopped_at_once_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(RECIPE)
    (tmp_path / "events").mkdir()
    source, page = page_of(tmp_path)
    assert_safe(source, page)
    assert "Three proposers" in page.text
    assert "nothing was logged" in page.text


def test_a_rollout_without_metrics_shows_its_rewards_and_episodes(tmp_path: Path) -> None:
    with EventLog.writing(tmp_path) as log:
        log_batch(log, "", ["46", "45", "44", "43"])
    source, page = page_of(tmp_path)
    text = " ".join(page.text.split())
    assert_safe(source, page)
    assert "0.500 mean reward" in text
    assert "rollout 4 0.500" in text
    assert "Size of the active sets" in text
    assert "All metrics" not in text


def test_an_evaluation_without_metrics_keeps_team_and_baseline_apart(tmp_path: Path) -> None:
    with EventLog.writing(tmp_path) as log:
        log_batch(log, "eval-0", ["46", "45"])
        log_batch(log, "baseline-0", ["46"] * 6, sizes=(1,))
    text = " ".join(page_of(tmp_path)[1].text.split())
    assert "evaluation" in text
    assert "eval-0 2 0.500" in text
    assert "baseline-0 6 0.500" in text
    assert "3.00 mean set size K" in text
    assert "mean reward 8" not in text


def test_an_evaluation_alone_shows_its_accuracy_for_each_set(tmp_path: Path) -> None:
    write_metrics(tmp_path, [evaluation(0, "team", 0.5, set="gsm8k"), evaluation(0, "team", 0.7, set="math")])
    with EventLog.writing(tmp_path) as log:
        log_batch(log, "eval-0", ["46", "45"])
    text = " ".join(page_of(tmp_path)[1].text.split())
    assert "Team on gsm8k" in text
    assert "Team on math" in text
    assert "measured 0.700" in text


def test_an_evaluation_of_several_sets_shows_their_mean_and_a_table_with_measures(tmp_path: Path) -> None:
    sets = [evaluation(0, "team", 0.5, set="nq", measures={"f1": 0.625}), evaluation(0, "team", 0.7, set="popqa")]
    write_metrics(tmp_path, [*sets, evaluation(0, "team", 0.6, sets=["nq", "popqa"], measures={"f1": 0.625})])
    page = page_of(tmp_path)[1]
    text = " ".join(page.text.split())
    assert "Team, mean of 2 sets 1,024 tasks measured 0.600" in text
    assert "team on nq 0 0.500 0.470 to 0.530 1,024 0.625" in text
    assert "measured 0.500" not in text


@pytest.mark.parametrize("updates", [1, 2, 60])
@pytest.mark.parametrize("value", [None, math.nan, 0.0, -3.0, 1e308])
def test_odd_metrics_break_nothing(updates: int, value: float | None, tmp_path: Path) -> None:
    names = [*metrics_of(1, 1, random.Random(0)), "new/agent=x"]
    lines = [{"kind": "update", "update": n, "metrics": dict.fromkeys(names, value)} for n in range(1, updates + 1)]
    lines += [evaluation(0, "team", None), evaluation(updates, "team", 0.5, avg_at_k_interval=[None, 1.0])]
    write_metrics(tmp_path, [*lines, {"kind": "of a later release"}, {"kind": "update", "update": updates}])
    source, page = page_of(tmp_path)
    assert_safe(source, page)
    assert "nan" not in page.text.lower()
    assert not re.search(r"\bnan\b", source, re.IGNORECASE)


def test_a_torn_line_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    trained_run(tmp_path)
    segment = next((tmp_path / "events").glob("*.jsonl"))
    segment.write_bytes(segment.read_bytes()[:-40])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "upd')
    (tmp_path / "run.json").write_text("{")
    (tmp_path / "config.yaml").write_text("a: [")
    source, page = page_of(tmp_path)
    assert_safe(source, page)
    assert "is damaged and was left out" in page.text
    assert "config.yaml can't be read as YAML" in page.text
    assert "Update 80" in page.text


def test_an_update_that_was_done_again_counts_once(tmp_path: Path) -> None:
    lines = [
        {"kind": "update", "update": n, "metrics": {"reward_mean": reward}}
        for n, reward in ((1, 0.1), (2, 0.2), (2, 0.9))
    ]
    write_metrics(tmp_path, lines)
    text = " ".join(page_of(tmp_path)[1].text.split())
    assert "reward_mean 0.100 0.900 0.100 0.900" in text


def test_the_report_replaces_the_earlier_one_or_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_run(tmp_path, updates=2)
    (tmp_path / "report.html").write_text("old")
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    monkeypatch.undo()
    assert write_report(tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text(encoding="utf-8").lstrip().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidInput, match="is not a run folder"):
            write_report(folder)
    assert list(tmp_path.iterdir()) == []
