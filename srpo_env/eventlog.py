"""The event log: what was acknowledged is on disk, and can be read back after a crash.

A run folder's `events/` holds journal segments, one per writer: JSON Lines, one unbuffered write per event, and a
checksum as each line's first key. A segment is never appended to by a second writer.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pydantic import ValidationError

from srpo_env.errors import DamagedLog, InvalidInput
from srpo_env.records import SCHEMA_VERSION, Event

if TYPE_CHECKING:
    from srpo_env.batch import EventBatch

_HEAD = b'{"crc32":"%08x",'
_HEAD_LENGTH = len(_HEAD % 0)


class Journal:
    """The writer of a run folder's events: what it has acknowledged survives the death of the process.

    Args:
        folder: A run folder; its `events/` is made where it is missing.

    Attributes:
        segment: Number of the segment that is being written.
        seconds: Time that it took so far.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.segment = 0
        self.seconds = 0.0
        self._file: int | None = None
        (self.folder / "events").mkdir(parents=True, exist_ok=True)
        self.rotate()

    def rotate(self) -> None:
        """Goes on in a new segment, so that what was logged until now can be told from what comes."""
        self.close()
        numbers = [int(path.stem) for path in (self.folder / "events").glob("*.jsonl") if path.stem.isdecimal()]
        number = 1 + max(numbers, default=0)
        while self._file is None:
            path = self.folder / "events" / f"{number:06d}.jsonl"
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
                self.segment = number
            except FileExistsError:
                number += 1

    def append(self, event: Event) -> None:
        """Writes an event; once this returns, it is safe.

        Raises:
            OSError: The event could not be written whole (a full disk); what was written before stays readable.
        """
        if self._file is None:
            raise OSError(f"{self.folder}: event {event.id} comes after the log was closed; open it again for writing.")
        started = time.perf_counter()
        line = _line(event)
        written = os.write(self._file, line)
        if written != len(line):
            os.ftruncate(self._file, os.lseek(self._file, 0, os.SEEK_END) - written)
            raise OSError(
                f"{self.folder}: {written} of {len(line)} bytes of event {event.id} were written; is the disk full?"
            )
        self.seconds += time.perf_counter() - started

    def close(self) -> None:
        """Closes the segment."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class EventLog:
    """Events in the order in which they were logged, in memory and, given a folder, on disk.

    Args:
        folder: A run folder to read. None: a log in memory.

    Attributes:
        events: All events.
        damage: One line for each torn end of a segment (a writer that was killed in the middle of a write).

    Raises:
        InvalidInput: The folder is not a run folder.
        DamagedLog: A segment is damaged somewhere other than at its end, or was written by a later release.

    Example:
        >>> log = EventLog()
        >>> len(log), log.batch().num_events
        (0, 0)
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.damage: list[str] = []
        self.events: list[Event] = [] if folder is None else list(read_events(folder, self.damage))
        self._journal: Journal | None = None

    @classmethod
    def writing(cls, folder: str | Path) -> EventLog:
        """Opens a folder's log for writing, in a new segment; what earlier segments hold is read."""
        folder = Path(folder)
        log = cls(folder) if (folder / "events").is_dir() else cls()
        log._journal = Journal(folder)  # noqa: SLF001 - its own class
        return log

    def append(self, event: Event) -> None:
        """Logs an event; see `Journal.append`."""
        if self._journal is not None:
            self._journal.append(event)
        self.events.append(event)

    def batch(self, name: str | None = None) -> EventBatch:
        """Returns the events as tensors: all of them, or those of one batch such as `update-12`."""
        from srpo_env.batch import EventBatch

        return EventBatch.from_events(event for event in self.events if name is None or event.batch == name)

    def episodes(self, batch: str | None = None) -> list[list[Event]]:
        """Returns the events of each episode, in order of step; of all batches, or of one."""
        found: dict[tuple[str, str], list[Event]] = {}
        for event in self.events:
            if batch is None or event.batch == batch:
                found.setdefault((event.batch, event.episode), []).append(event)
        return list(found.values())

    def close(self) -> None:
        """Closes the file; the log stays readable."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def extend(self, events: Iterable[Event]) -> None:
        """Logs several events."""
        for event in events:
            self.append(event)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(folder: str | Path, damage: list[str] | None = None) -> Iterator[Event]:
    """Yields the events of a run folder one at a time: a long run holds more than fit in memory.

    Args:
        folder: A run folder.
        damage: Gets one line for each torn end of a segment.

    Raises:
        InvalidInput, DamagedLog: See `EventLog`.
    """
    folder = Path(folder)
    if not (folder / "events").is_dir():
        raise InvalidInput(f"{folder} is not a run folder: it has no folder `events`; give one that `train` made.")
    for segment in sorted((folder / "events").glob("*.jsonl")):
        yield from _read_segment(segment, [] if damage is None else damage)


def _read_segment(segment: Path, damage: list[str]) -> Iterator[Event]:
    offset = 0
    with segment.open("rb") as file:
        for line in file:  # a binary file's lines end at b"\n" only
            found, whole = _event(line.rstrip(b"\n"), segment), line.endswith(b"\n")
            if isinstance(found, Event):
                yield found
            elif whole:
                raise DamagedLog(
                    f"{segment}: damaged line at byte {offset} ({found}); only the last line of a segment may be "
                    "torn. Restore the file, or move it out of `events/` to go on without it."
                )
            else:
                damage.append(f"{segment}: torn line at byte {offset} ({found}); its event was never acknowledged.")
            if not whole:
                return  # a writer that is at work may have gone on meanwhile, in the middle of this line
            offset += len(line)


def _line(event: Event) -> bytes:
    body = event.model_dump_json().encode()
    return _HEAD % zlib.crc32(body) + body[1:] + b"\n"


def _event(line: bytes, segment: Path) -> Event | str:
    """Returns the event of a line, or what is wrong with it."""
    if not line.startswith(b'{"crc32":"') or len(line) <= _HEAD_LENGTH:
        return "no checksum"
    body = b"{" + line[_HEAD_LENGTH:]
    if _HEAD % zlib.crc32(body) != line[:_HEAD_LENGTH]:
        return "checksum differs"
    try:
        return Event.model_validate_json(body)
    except ValidationError as error:
        version = json.loads(body).get("schema_version")
        if version != SCHEMA_VERSION:
            raise DamagedLog(
                f"{segment}: event schema version {version!r}; this release reads {SCHEMA_VERSION}. Open the run with "
                "the release that wrote it."
            ) from error
        return f"not an event: {error.errors()[0]['msg']}"
