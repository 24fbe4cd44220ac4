"""The question-answering task sets by name: where each lies, and under which licence."""

from __future__ import annotations

from collections.abc import Mapping

from srpo_env.tools.named_sets import NamedSet
from srpo_env.tools.qa import qa_exact_match


def _set(name: str, licence: str, splits: Mapping[str, str]) -> NamedSet:
    """All are in one collection on the hub; `splits` maps ours to what that and the files call them."""
    return NamedSet(
        name,
        "search",
        dict.fromkeys(splits, (f"{name}.jsonl",)),
        f"RUC-NLPIR/FlashRAG_datasets:{name}",
        splits,
        licence,
        qa_exact_match,
        columns={"question": "problem", "golden_answers": "answers"},
    )


_TEST = {"test": "test"}
_TRAIN_TEST = {"train": "train", "test": "test"}
_TRAIN_DEV = {"train": "train", "dev": "dev", "test": "dev"}  # the test answers are not public

nq = _set("nq", "CC BY-SA 3.0", _TRAIN_TEST)
triviaqa = _set("triviaqa", "unknown (questions of trivia sites)", _TRAIN_TEST)
popqa = _set("popqa", "MIT", _TEST)
hotpotqa = _set("hotpotqa", "CC BY-SA 4.0", _TRAIN_DEV)
wikimultihopqa = _set("2wikimultihopqa", "Apache-2.0", _TRAIN_DEV)
musique = _set("musique", "CC BY 4.0", _TRAIN_DEV)
bamboogle = _set("bamboogle", "MIT", _TEST)
