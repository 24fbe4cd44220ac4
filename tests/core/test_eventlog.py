"""Is what was acknowledged still there, whatever happened, and is it what was logged?"""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srpo_env.errors import DamagedLog, InvalidInput
from srpo_env.eventlog import EventLog, Journal, read_events
from srpo_env.records import Event, Member, Message, Output, Parse, Sampling, ToolCall

Make = Callable[..., Any]

WRITER = """
import os, sys
from pathlib import Path
from srpo_env.eventlog import EventLog
from srpo_env.records import Event, Member, Output, Parse

folder, names, count, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
name = names[0]
for other in names[1:]:
    if os.fork() == 0:
        name = other
        break
log = EventLog.writing(folder)
for step in range(count):
    parse = Parse(ok=True)
    member = Member(agent="a", index=0, turn=0, policy="main", messages=(), sampling=None,
                    output=Output(text=name * size), parse=parse)
    log.append(Event(run="r", task="t", group="g", episode=name, step=step, node="n", visit=0, members=(member,),
                     next_node="end", state_before="", state_after="", reward=0.0, terminated=False, truncated=False))
    os.write(1, b"%d\\n" % step)
if name == names[0]:
    sys.exit(any(os.wait()[1] for _ in names[1:]))
"""


def write(folder: Path, *events: Event) -> Path:
    """Logs events and returns their segment."""
    with EventLog.writing(folder) as log:
        log.extend(events)
    return max((folder / "events").glob("*.jsonl"))


def steps(folder: Path) -> list[int]:
    return [each.step for each in EventLog(folder)]


# What is written is what is read.


TEXT = st.text(st.characters(codec=None), max_size=20)
FLOAT = st.floats()
OUTPUT = st.builds(
    Output,
    text=TEXT,
    prompt_ids=st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple),
    output_ids=st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple),
    logprobs=st.none() | st.lists(FLOAT, max_size=3).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    seconds=st.floats(0, 10),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
MEMBER = st.builds(
    Member,
    agent=st.just("solver"),
    index=st.integers(0, 3),
    turn=st.just(0),
    policy=st.just("main"),
    messages=st.lists(st.builds(Message, role=st.just("user"), content=TEXT), max_size=2).map(tuple),
    sampling=st.none() | st.just(Sampling(temperature=0.5)),
    output=OUTPUT,
    parse=st.builds(Parse, ok=st.booleans(), value=JSON, error=st.none() | TEXT),
    tool_calls=st.lists(
        st.builds(ToolCall, tool=TEXT, arguments=st.dictionaries(TEXT, JSON, max_size=2), result=TEXT), max_size=2
    ).map(tuple),
    error=st.none() | TEXT,
)
EVENT = st.builds(
    Event,
    run=st.just("r"),
    task=st.just("t"),
    group=st.just("g"),
    episode=st.just("e"),
    step=st.integers(0, 9),
    node=st.just("n"),
    visit=st.just(0),
    members=st.lists(MEMBER, max_size=2).map(tuple),
    value=JSON,
    next_node=st.just("end"),
    state_before=st.just(""),
    state_after=st.just(""),
    reward=st.none() | FLOAT,
    score_reason=st.none() | TEXT,
    measures=st.dictionaries(TEXT, FLOAT, max_size=2),
    answer=st.none() | TEXT,
    terminated=st.booleans(),
    truncated=st.booleans(),
)


@settings(max_examples=settings.default.max_examples // 4)
@given(events=st.lists(EVENT, max_size=2))
def test_what_is_read_equals_what_was_logged(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    folder = tmp_path_factory.mktemp("run")
    write(folder, *events)
    assert EventLog(folder).events == events


def test_a_log_from_before_measures_opens(tmp_path: Path, event: Make) -> None:
    made = event()
    path = write(tmp_path, made)
    body = json.dumps({key: value for key, value in json.loads(made.model_dump_json()).items() if key != "measures"})
    path.write_bytes(b'{"crc32":"%08x",' % zlib.crc32(body.encode()) + body.encode()[1:] + b"\n")
    assert EventLog(tmp_path).events == [made]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_come_back(tmp_path: Path, event: Make, member: Make, value: float) -> None:
    write(tmp_path, event([member(output_ids=(1,), logprobs=(value,))]))
    (found,) = EventLog(tmp_path).events[0].members[0].output.logprobs or ()
    assert found == value or (math.isnan(found) and math.isnan(value))


def test_every_line_is_strict_json(tmp_path: Path, event: Make, member: Make) -> None:
    text = "\ud835 a\u2028b\u0085c\u2029d \x00"
    segment = write(tmp_path, event([member(text, logprobs=(math.nan,))], reward=math.inf))
    (line,) = segment.read_bytes().removesuffix(b"\n").split(b"\n")
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\r", "\x0b", "\x0c", "\x1c", "\n"], ids=ascii)
def test_a_line_separator_in_a_text_does_not_cut_the_record(
    tmp_path: Path, event: Make, member: Make, mark: str
) -> None:
    write(tmp_path, event([member(f"a{mark}b")]))
    assert [each.members[0].output.text for each in EventLog(tmp_path)] == [f"a{mark}b"]


# What a crash leaves.


def test_a_torn_last_line_is_reported_with_its_place_and_costs_only_itself(tmp_path: Path, event: Make) -> None:
    segment = write(tmp_path, event(step=1), event(step=2))
    whole = segment.read_bytes()
    second = whole.index(b"\n") + 1
    segment.write_bytes(whole[:-20])
    log = EventLog(tmp_path)
    assert [each.step for each in log] == [1]
    assert len(log.damage) == 1
    assert f"torn line at byte {second}" in log.damage[0]


@pytest.mark.parametrize("left", [1, 5, 20, 30, 200])
def test_a_line_torn_anywhere_is_no_event(tmp_path: Path, event: Make, left: int) -> None:
    segment = write(tmp_path, event(step=1))
    segment.write_bytes(segment.read_bytes() + segment.read_bytes()[:left])
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("missing", [1, 2, 200])
def test_a_line_that_is_still_being_written_ends_what_is_read(tmp_path: Path, event: Make, missing: int) -> None:
    with EventLog.writing(tmp_path) as log:
        log.extend([event(step=0), event(step=1)])
    (segment,) = (tmp_path / "events").iterdir()
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-missing])

    class Damage(list[str]):
        def append(self, text: str) -> None:
            super().append(text)
            segment.write_bytes(whole)  # the writer goes on before the reader does

    damage, steps = Damage(), []
    for each in read_events(tmp_path, damage):
        steps.append(each.step)
        if each.step == 1:
            segment.write_bytes(whole)
    assert (steps, len(damage)) == (([0, 1], 0) if missing == 1 else ([0], 1))


def test_a_line_cut_inside_a_character_is_a_torn_line(tmp_path: Path, event: Make, member: Make) -> None:
    segment = write(tmp_path, event([member("é" * 300)], step=1))
    data = segment.read_bytes()
    segment.write_bytes(data + data[: data.index("é".encode()) + 1])
    assert steps(tmp_path) == [1]


def test_what_is_logged_after_a_torn_line_is_kept(tmp_path: Path, event: Make) -> None:
    segment = write(tmp_path, event(step=1), event(step=2))
    segment.write_bytes(segment.read_bytes()[:-20])
    write(tmp_path, event(step=3))
    assert steps(tmp_path) == [1, 3]


def test_a_last_line_that_lost_only_its_newline_is_an_event(tmp_path: Path, event: Make) -> None:
    segment = write(tmp_path, event(step=1))
    segment.write_bytes(segment.read_bytes().rstrip(b"\n"))
    assert steps(tmp_path) == [1]


def test_damage_in_the_middle_is_an_error_that_names_file_and_place(tmp_path: Path, event: Make) -> None:
    segment = write(tmp_path, event(step=1), event(step=2))
    data = bytearray(segment.read_bytes())
    data[40] ^= 1
    segment.write_bytes(data)
    with pytest.raises(DamagedLog, match=rf"{segment}: damaged line at byte 0 \(checksum differs\)"):
        EventLog(tmp_path)


def test_a_line_without_a_checksum_is_damage(tmp_path: Path, event: Make) -> None:
    segment = write(tmp_path, event(step=1))
    segment.write_bytes(b'{"step":1}\n' + segment.read_bytes())
    with pytest.raises(DamagedLog, match="no checksum"):
        EventLog(tmp_path)


def test_an_event_of_a_later_schema_is_named_with_its_file(tmp_path: Path, event: Make) -> None:
    segment = write(tmp_path, event().model_copy(update={"schema_version": 7}))
    with pytest.raises(DamagedLog, match=rf"{segment}: event schema version 7; this release reads 1"):
        EventLog(tmp_path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not a run folder"):
        EventLog(tmp_path)


def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), "w", "1000000", "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(50)]
        os.kill(writer.pid, signal.SIGKILL)
        said += writer.stdout.readlines()
    acknowledged = [int(line) for line in said if line.endswith(b"\n")]
    assert steps(tmp_path)[: len(acknowledged)] == acknowledged


def test_six_writers_at_once_log_every_record_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), "abcdef", "30", "300000"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    log = EventLog(tmp_path)
    assert sorted((each.episode, each.step) for each in log) == [(n, s) for n in "abcdef" for s in range(30)]
    assert log.damage == []
    assert {each.members[0].output.text == each.episode * 300_000 for each in log} == {True}


# A full disk.


def test_a_short_write_is_an_error(tmp_path: Path, event: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    log = EventLog.writing(tmp_path)
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:10]))
    with pytest.raises(OSError, match=r"10 of \d+ bytes of event g/0/0 were written"):
        log.append(event())
    log.close()


def test_after_a_short_write_the_log_goes_on(tmp_path: Path, event: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    log = EventLog.writing(tmp_path)
    log.append(event(step=1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: real(file, data[:10]))
        with pytest.raises(OSError, match="disk full"):
            log.append(event(step=2))
    log.append(event(step=3))
    log.close()
    assert steps(tmp_path) == [1, 3]
    assert [each.step for each in log] == [1, 3]


def test_an_event_that_could_not_be_written_is_not_in_the_log(
    tmp_path: Path, event: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = EventLog.writing(tmp_path)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        log.append(event())
    log.close()
    assert len(log) == 0


# Segments and views.


def test_a_second_writer_starts_a_segment_of_its_own(tmp_path: Path, event: Make) -> None:
    first, second = write(tmp_path, event(step=1)), write(tmp_path, event(step=2))
    assert first != second
    assert steps(tmp_path) == [1, 2]


def test_a_file_that_is_no_segment_does_not_stop_a_writer(tmp_path: Path, event: Make) -> None:
    segment = write(tmp_path, event(step=1))
    segment.rename(segment.with_name("kept.jsonl"))
    write(tmp_path, event(step=2))
    assert sorted(steps(tmp_path)) == [1, 2]


def test_a_log_opened_for_writing_holds_what_was_there(tmp_path: Path, event: Make) -> None:
    write(tmp_path, event(step=1))
    with EventLog.writing(tmp_path) as log:
        log.append(event(step=2))
        assert [each.step for each in log] == [1, 2]


def test_a_closed_log_stays_readable(tmp_path: Path, event: Make) -> None:
    log = EventLog.writing(tmp_path)
    log.append(event())
    log.close()
    assert len(log) == 1


def test_a_batch_can_be_asked_for_by_name(event: Make) -> None:
    log = EventLog()
    log.extend([event(batch="update-1"), event(batch="update-2", step=1), event(batch="update-2", step=2)])
    assert log.batch("update-2").num_events == 2
    assert log.batch().num_events == 3


def test_episodes_of_two_batches_are_told_apart(event: Make) -> None:
    log = EventLog()
    log.extend([event(batch="eval-0"), event(batch="eval-1"), event(batch="eval-1", step=1)])
    assert [[each.batch for each in events] for events in log.episodes()] == [["eval-0"], ["eval-1", "eval-1"]]


def test_episodes_of_one_batch_can_be_asked_for(event: Make) -> None:
    log = EventLog()
    log.extend([event(batch="eval-0"), event(batch="eval-1", step=1)])
    assert [[each.step for each in events] for events in log.episodes("eval-1")] == [[1]]


def test_a_rotated_journal_goes_on_in_the_next_segment(tmp_path: Path, event: Make) -> None:
    journal = Journal(tmp_path)
    journal.append(event(step=1))
    first = journal.segment
    journal.rotate()
    journal.append(event(step=2))
    journal.close()
    assert (first, journal.segment) == (1, 2)
    assert steps(tmp_path) == [1, 2]


def test_two_writers_never_share_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see an empty folder, as two that start at once do."""
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    journals = [Journal(tmp_path) for _ in range(3)]
    assert [journal.segment for journal in journals] == [1, 2, 3]
    for journal in journals:
        journal.close()


def test_a_closed_journal_takes_no_events(tmp_path: Path, event: Make) -> None:
    journal = Journal(tmp_path)
    journal.close()
    with pytest.raises(OSError, match="event g/0/0 comes after the log was closed"):
        journal.append(event())


def test_events_can_be_read_one_at_a_time(tmp_path: Path, event: Make) -> None:
    write(tmp_path, event(step=1), event(step=2))
    assert next(iter(read_events(tmp_path))).step == 1
