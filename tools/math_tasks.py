"""The math task sets by name: where each lies, under which licence, and what its rows mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from srpo_env.tasks import Task
from srpo_env.tools.math_answers import Answer, reference_of, settle
from srpo_env.tools.math_verification import math_verify
from srpo_env.tools.named_sets import NamedSet

_MAA = "problems (c) MAA, none stated"
_DAPO_FORM = re.compile(
    r"\ASolve the following math problem step by step\. The last line [^\n]*\n+(.*?)\n+"
    r"Remember to put your answer [^\n]*\Z",
    re.DOTALL,
)
"""Asks for a last line `Answer: ...`, where our workflows ask for a box."""
_CODE_FORM = re.compile(r"\d\.?(?:\d*e[-+]?\d+)?/\d|\d*\.?\d*e[-+]?\d+|np\.", re.IGNORECASE)


def unscorable(task: Task) -> str | None:
    """Returns why none of a task's references can be compared with, as far as that shows without algebra."""
    settled = [settle(reference_of(text), Answer("\0")) for text in task.answers]
    reasons = [found[1] for found in settled if found and found[0] == "unscorable"]
    return reasons[0] if len(reasons) == len(settled) and reasons else None


def _minerva(row: dict[str, Any]) -> dict[str, Any]:
    """Some answers are written as code (`3.83e35`, `np.arcsin(10/13)`); their LaTeX form stands beside them."""
    written = row.get("answer_latex")
    return row | {"answer": written} if written and _CODE_FORM.match(str(row["answer"])) else row


def _olympiadbench(row: dict[str, Any]) -> dict[str, Any]:
    """Lists get a space behind each comma: `108,135` is two numbers there and not one."""
    row = dict(row)
    for ours, theirs in (("answer", "final_answer"), ("error_tolerance", "error")):
        if theirs in row:
            row.setdefault(ours, row.pop(theirs))
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    if row.get("is_multiple_answer"):
        answers = [re.sub(r",(?=\S)", ", ", str(answer)) for answer in answers]
    return row | {"answer": answers}


def _dapo(row: dict[str, Any]) -> dict[str, Any]:
    """On the hub the problem is a chat, between instructions, and the answer the ground truth of a reward model."""
    if "reward_model" not in row:
        return row
    problem, answer = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
    problem = _DAPO_FORM.sub(r"\1", problem)
    return {"id": str(row["extra_info"]["index"]), "problem": problem, "answer": answer, "source": row["data_source"]}


def _set(
    name: str,
    hub: str,
    licence: str,
    *,
    files: Mapping[str, tuple[str, ...]] | None = None,
    splits: Mapping[str, str] | None = None,
    columns: Mapping[str, str] | None = None,
    fix: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    repeats: bool = False,
) -> NamedSet:
    return NamedSet(
        name,
        "math",
        files or {"test": (f"{name}.jsonl",)},
        hub,
        splits or {"test": "test"},
        licence,
        math_verify,
        columns={"question": "problem"} | dict(columns or {}),
        fix=fix,
        repeats=repeats,
        check=unscorable,
    )


gsm8k = _set(
    "gsm8k",
    "openai/gsm8k:main",
    "MIT",
    files={"train": ("gsm8k_train.jsonl", "gsm8k_train_1000.jsonl"), "test": ("gsm8k_test.jsonl", "gsm8k.jsonl")},
    splits={"train": "train", "test": "test"},
)
math500 = _set("math500", "HuggingFaceH4/MATH-500", "MIT", columns={"unique_id": "id"})
aime24 = _set("aime24", "HuggingFaceH4/aime_2024", _MAA, splits={"test": "train"})
aime25 = _set("aime25", "math-ai/aime25", _MAA)
amc23 = _set("amc23", "math-ai/amc23", _MAA)
minerva = _set(
    "minerva",
    "math-ai/minervamath",
    "CC BY-NC-SA 4.0 (MIT OpenCourseWare)",
    files={"test": ("minerva.jsonl", "minerva_math.jsonl")},
    fix=_minerva,
)
olympiadbench = _set("olympiadbench", "math-ai/olympiadbench", "Apache-2.0", fix=_olympiadbench)
dapo_math = _set(
    "dapo_math",
    "BytedTsinghua-SIA/DAPO-Math-17k",
    "Apache-2.0",
    files={"train": ("dapo_math.jsonl",)},
    splits={"train": "train"},
    fix=_dapo,
    repeats=True,
)
