"""Search in a corpus that fits into memory: BM25, in this process, with the index cached on disk.

A passage counts its title twice. Words are runs of letters and digits, in lower case and without accents. The score is
BM25 with the never-negative idf, ln(1 + (N - n + 1/2) / (n + 1/2)) for a word in n of N passages (Lucene's).
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import platformdirs
from pydantic import BaseModel, ConfigDict, Field

from srpo_env.errors import InvalidInput, ToolError
from srpo_env.settings import checked

K1 = 1.2
B = 0.75
FORMAT = 1
"""Part of a cached index's name: another way to read words or to store them gets another number."""

MOST_QUERY_CHARS = 1000

_WORD = re.compile(r"\w+")
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage, and how well it matches the query that found it."""

    id: str
    title: str
    text: str
    score: float = 0.0


def words(text: str) -> list[str]:
    """Returns a text's words, in lower case and without accents.

    >>> words("Ångström's unit, 1868")
    ['angstrom', 's', 'unit', '1868']
    """
    text = text.lower()
    if not text.isascii():
        text = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    return _WORD.findall(text)


class SearchIndex:
    """Passages that can be searched.

    Example:
        >>> index = SearchIndex([Passage("a", "Oslo", "Rain falls."), Passage("b", "Bergen", "More rain falls.")])
        >>> [passage.id for passage in index.search("rain in Bergen")]
        ['b', 'a']

    Args:
        passages: At least one, each with an id of its own.
        scores: What was computed for them before; None: computed now.
    """

    def __init__(self, passages: Iterable[Passage], *, scores: Scores | None = None) -> None:
        self.passages = tuple(passages)
        self._scores = _built(self.passages) if scores is None else scores

    @classmethod
    def load(cls, path: str | Path, *, cache: str | Path | None = None) -> SearchIndex:
        """Reads a corpus and its index; the index is built when the corpus is new or has changed.

        Args:
            path: JSON Lines with `id`, `text` and perhaps `title`; other keys are ignored.
            cache: Folder of cached indexes; None: $SRPO_ENV_CACHE, else the user's cache folder.

        Raises:
            InvalidInput: The file can't be read, a row is not a passage, or an id is repeated; with its line.
        """
        path = Path(path).expanduser()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InvalidInput(
                f"corpus {str(path)!r} can't be read: {error.strerror}; give a JSON Lines file with rows of id, title, "
                "text."
            ) from error
        passages = tuple(_passages(content, path))
        name = hashlib.blake2b(content, digest_size=16, salt=b"%d" % FORMAT).hexdigest()
        file = (Path(cache) if cache is not None else cache_folder()) / f"bm25-{name}.npz"
        scores = _read(file, len(passages))
        if scores is None:
            scores = _built(passages)
            _write(file, scores)
        return cls(passages, scores=scores)

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, query: str, k: int = 10) -> list[Passage]:
        """Returns the passages that share a word with the query, best first, equal ones in the corpus's order.

        Args:
            query: Any text; without a word that the corpus knows, nothing is found.
            k: Most passages.
        """
        if k < 1:
            raise InvalidInput(f"k {k}; it is the number of passages to find, at least 1.")
        scores = self._scores.of(words(query))
        if k < len(scores):
            found = np.flatnonzero(scores >= max(np.partition(scores, -k)[-k], np.finfo(scores.dtype).tiny))
        else:
            found = np.flatnonzero(scores > 0)
        best = found[np.argsort(-scores[found], kind="stable")[:k]]
        return [replace(self.passages[at], score=float(scores[at])) for at in best]


@dataclass(frozen=True, slots=True)
class Scores:
    """What each word adds to each passage's score: those of word w are [indptr[w]:indptr[w + 1]]."""

    passages: int
    places: Mapping[str, int]
    data: npt.NDArray[np.float32]
    indices: npt.NDArray[np.int32]
    indptr: npt.NDArray[np.int64]
    rows: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    """The same for words in more than an eighth of the passages, zeros filled in: adding such a row is faster."""

    def of(self, query: Iterable[str]) -> npt.NDArray[np.float32]:
        """Returns every passage's score; a word that stands in the query twice counts twice."""
        scores = np.zeros(self.passages, dtype=np.float32)
        for word in query:
            if (at := self.places.get(word)) is not None:
                begin, end = self.indptr[at], self.indptr[at + 1]
                if (end - begin) * 8 > self.passages:
                    scores += self._row(at)
                else:
                    scores[self.indices[begin:end]] += self.data[begin:end]
        return scores

    def _row(self, at: int) -> npt.NDArray[np.float32]:
        if at not in self.rows:
            row = np.zeros(self.passages, dtype=np.float32)
            row[self.indices[self.indptr[at] : self.indptr[at + 1]]] = self.data[self.indptr[at] : self.indptr[at + 1]]
            self.rows[at] = row
        return self.rows[at]


class SearchSettings(BaseModel):
    """Settings of the tool `bm25`.

    Attributes:
        corpus: JSON Lines with rows of `id, title, text`.
        top_k: Most passages of a result.
        max_chars: Longest text of a passage in a result; what is cut is counted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    corpus: str
    top_k: int = Field(3, ge=1, le=100)
    max_chars: int = Field(2000, ge=1)


class DemoSettings(SearchSettings):
    """Settings of the tool `search`: those of `bm25`, in a dozen passages that ship unless `corpus` is set."""

    corpus: str = str(Path(__file__).with_name("corpus_demo.jsonl"))


class Search:
    """Search as a tool: the passages as text, numbered and with their titles.

    Nothing found is a result, `No results.`; an empty query is a failed call.
    """

    description = "Searches for passages; give a few words."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "A few words to search for."}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, name: str, top_k: int, max_chars: int) -> None:
        self.name, self.top_k, self.max_chars = name, top_k, max_chars

    async def find(self, query: str) -> Sequence[Passage]:
        """Returns at most `top_k` passages, best first."""
        raise NotImplementedError

    async def __call__(self, query: str) -> str:
        """Returns what was found, as text."""
        if not isinstance(query, str) or not query.strip():
            raise ToolError(f"{self.name}: the query is empty; write a few words.")
        if len(query) > MOST_QUERY_CHARS:
            raise ToolError(
                f"{self.name}: the query has {len(query)} characters, at most {MOST_QUERY_CHARS} are searched for; "
                "write a few words."
            )
        found = await self.find(query)
        return "\n\n".join(itertools.starmap(self._shown, enumerate(found, 1))) or "No results."

    def _shown(self, number: int, passage: Passage) -> str:
        text, cut = passage.text[: self.max_chars], len(passage.text) - self.max_chars
        if cut > 0:
            text += f" [... {cut} characters cut]"
        return f"[{number}] {passage.title}\n{text}" if passage.title else f"[{number}] {text}"


class SearchTool(Search):
    """BM25 search in this process, as a tool.

    Args:
        index: What is searched.
        name: What agents call it by.
        top_k: Most passages of a result.
        max_chars: Longest text of a passage.
    """

    settings: ClassVar[type[SearchSettings]] = SearchSettings
    demo: ClassVar[bool] = False

    def __init__(self, index: SearchIndex, *, name: str = "search", top_k: int = 3, max_chars: int = 2000) -> None:
        super().__init__(name, top_k, max_chars)
        self.index = index

    @classmethod
    def from_config(cls, name: str, settings: Mapping[str, Any]) -> SearchTool:
        """Returns the tool that a recipe describes.

        Raises:
            InvalidInput: A key is unknown or missing, a value breaks a rule, or the corpus can't be read.
        """
        values = checked(cls.settings, f"tools.{name}", settings)
        return cls(cls._index(values.corpus), name=name, top_k=values.top_k, max_chars=values.max_chars)

    @classmethod
    def _index(cls, corpus: str) -> SearchIndex:
        return SearchIndex.load(corpus)

    async def find(self, query: str) -> Sequence[Passage]:
        """Returns at most `top_k` passages, best first."""
        return self.index.search(query, self.top_k)


class DemoSearch(SearchTool):
    """The tool `search`: what a workflow that searches gets where no corpus is configured, so that it can be tried."""

    settings = DemoSettings
    demo = True

    @classmethod
    def _index(cls, corpus: str) -> SearchIndex:
        return _demo_index() if corpus == DemoSettings().corpus else SearchIndex.load(corpus)


def cache_folder() -> Path:
    """Where indexes are cached: $SRPO_ENV_CACHE, else the user's cache folder."""
    return Path(os.environ.get("SRPO_ENV_CACHE") or platformdirs.user_cache_dir("srpo-env"))


@cache
def _demo_index() -> SearchIndex:
    path = Path(DemoSettings().corpus)
    return SearchIndex(_passages(path.read_bytes(), path))


def _passages(content: bytes, path: Path) -> Iterable[Passage]:
    seen: set[str] = set()
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidInput(f"{where}: the row is not JSON: {error}; a row is {_ROW}.") from error
        if not isinstance(row, dict):
            raise InvalidInput(f"{where}: the row is a {type(row).__name__}; a row is {_ROW}.")
        name, title, text = row.get("id"), row.get("title") or "", row.get("text")
        if isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        if not (isinstance(name, str) and isinstance(title, str) and isinstance(text, str)):
            raise InvalidInput(f"{where}: the row has no `id` or `text`, or one that is no text; a row is {_ROW}.")
        if name in seen:
            raise InvalidInput(f"{where}: id {name!r} stands in an earlier row; every passage has an id of its own.")
        seen.add(name)
        yield Passage(name, title, text)


_ROW = '{"id": "1", "title": "Oslo", "text": "Oslo is ..."}'


def _built(passages: Sequence[Passage]) -> Scores:
    import bm25s  # takes half a second, and a cached index does without

    if not passages:
        raise InvalidInput("the corpus has no passages; at least one is needed.")
    places: dict[str, int] = {}
    ids = [[places.setdefault(word, len(places)) for word in words(f"{p.title} {p.title} {p.text}")] for p in passages]
    if not places:
        return Scores(len(passages), {}, np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(1, np.int64))
    index = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
    index.index((ids, places), create_empty_token=False, show_progress=False)
    return Scores(len(passages), places, *(index.scores[name] for name in _ARRAYS))


_ARRAYS = ("data", "indices", "indptr")


def _read(file: Path, passages: int) -> Scores | None:
    """Returns a cached index; None where there is none, or one that is damaged."""
    try:
        whole = file.read_bytes()
    except OSError:
        return None
    digest, content = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
    if hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() != digest:
        return None
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        text = stored["words"].tobytes().decode()
        places = {word: at for at, word in enumerate(text.split("\n"))} if text else {}
        return Scores(passages, places, *(stored[name] for name in _ARRAYS))


def _write(file: Path, scores: Scores) -> None:
    """Caches an index, whole or not at all; a folder that can't be written is no reason to stop."""
    buffer = io.BytesIO()
    vocabulary = np.frombuffer("\n".join(scores.places).encode(), dtype=np.uint8)
    np.savez(buffer, words=vocabulary, data=scores.data, indices=scores.indices, indptr=scores.indptr)
    content = buffer.getvalue()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-")
        try:
            with os.fdopen(descriptor, "wb") as out:
                out.write(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() + content)
                out.flush()
                os.fsync(out.fileno())
            Path(temporary).replace(file)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
