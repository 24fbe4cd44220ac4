"""What rows does a file of tasks hold, or a data set of the Hugging Face hub?

JSON Lines and CSV need nothing; Parquet and the hub need the extra `datasets`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from srpo_env.errors import InvalidTask, MissingExtra

HUB = "datasets:"
Rows = Iterator[tuple[str, dict[str, Any]]]
"""Rows, each with the place to name in an error."""


def is_rows(use: str) -> bool:
    """Whether this is a file of tasks, or `datasets:ORG/NAME`.

    >>> is_rows("my.csv"), is_rows("datasets:openai/gsm8k:main"), is_rows("gsm8k")
    (True, True, False)
    """
    return use.startswith(HUB) or Path(use).suffix in _READERS


def read_rows(use: str | Path, split: str = "train") -> Rows:
    """Yields the rows of a file, or of `datasets:ORG/NAME` or `datasets:ORG/NAME:CONFIG`.

    Args:
        use: What to read.
        split: Of a data set of the hub; a file has one split, whatever it is called.

    Raises:
        InvalidTask: It can't be read, or a row is no object.
        MissingExtra: The extra `datasets` is needed and not installed.
    """
    if str(use).startswith(HUB):
        yield from _hub(str(use), split)
        return
    path = Path(use)
    if path.suffix not in _READERS:
        raise InvalidTask(f"task file {path} ends in {path.suffix!r}; known are {', '.join(_READERS)}.")
    try:
        yield from _READERS[path.suffix](path)
    except OSError as error:
        raise InvalidTask(
            f"task file {path} can't be read: {error.strerror or error}; give the path of a .jsonl file."
        ) from error


def _json_lines(path: Path) -> Rows:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidTask(f"{path}:{number}: not JSON ({error}); each line is one JSON object.") from error
        if not isinstance(row, dict):
            raise InvalidTask(
                f"{path}:{number}: a {type(row).__name__}; each line is one JSON object with id, problem and answer."
            )
        yield f"{path}:{number}", row


def _csv(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restkey="")
        try:
            for row in reader:
                if "" in row:
                    raise InvalidTask(f"{path}:{reader.line_num}: more fields than the {len(row) - 1} columns.")
                yield f"{path}:{reader.line_num}", {key: value for key, value in row.items() if value is not None}
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidTask(f"{path}:{reader.line_num}: not CSV in UTF-8 ({error}).") from error


def _parquet(path: Path) -> Rows:
    pyarrow = _needed("pyarrow", str(path))
    parquet = import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except pyarrow.ArrowInvalid as error:
        raise InvalidTask(f"task file {path} is no Parquet file: {error}") from error


def _hub(use: str, split: str) -> Rows:
    datasets = _needed("datasets", use)
    name, _, config = use.removeprefix(HUB).partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:
        raise InvalidTask(f"{use}, split {split!r} can't be loaded: {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{use}:{number}", dict(row)


def _needed(module: str, what: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{what} needs the package {error.name!r}, which is not installed; run `pip install 'srpo-env[datasets]'`."
        ) from error


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}
