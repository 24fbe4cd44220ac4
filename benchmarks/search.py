"""How fast is search, and how much does one plain query find?

    OMP_NUM_THREADS=1 SRPO_ENV_DATA=... python benchmarks/search.py [--k 10] [--repeats 3]

SRPO_ENV_DATA holds search/corpus.jsonl and questions of HotpotQA, 2WikiMultihopQA and MuSiQue with the ids of their
gold passages. The query is the question as it stands; recall is the mean share of a question's gold passages in the
first k. Times are the best of the repeats: the build (reading and indexing, nothing cached), loading the cached index,
and searching for every question, one after the other.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from srpo_env.tools import SearchIndex

SETS = ("hotpotqa", "2wikimultihopqa", "musique")


def rows(path: Path) -> list[dict[str, Any]]:
    """Reads JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def recall(index: SearchIndex, questions: list[dict[str, Any]], k: int) -> float:
    """Mean share of a question's gold passages among the first k."""
    shares = []
    for row in questions:
        found = {passage.id for passage in index.search(row["question"], k)}
        shares.append(len(found.intersection(row["supporting_ids"])) / len(row["supporting_ids"]))
    return sum(shares) / len(shares)


def main() -> None:
    """Prints one line of figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = Path(os.environ["SRPO_ENV_DATA"]) / "search"
    questions = {name: rows(folder / f"{name}.jsonl") for name in SETS}
    queries = [row["question"] for name in SETS for row in questions[name]]
    build_s, load_s, search_s = [], [], []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for times in (build_s, load_s):
                began = time.perf_counter()
                index = SearchIndex.load(folder / "corpus.jsonl", cache=cache)
                times.append(time.perf_counter() - began)
        began = time.perf_counter()
        for query in queries:
            index.search(query, options.k)
        search_s.append(time.perf_counter() - began)
    figures: dict[str, Any] = {
        "passages": len(index),
        "build_s": round(min(build_s), 2),
        "load_cached_s": round(min(load_s), 2),
        "queries": len(queries),
        "queries_per_s": round(len(queries) / min(search_s)),
    }
    for name in SETS:
        dev = [row for row in questions[name] if row["split"] == "dev"]
        figures[f"recall@{options.k} {name}"] = {
            "all": round(recall(index, questions[name], options.k), 3),
            "dev": round(recall(index, dev, options.k), 3),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
