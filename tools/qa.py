r"""Is an answer to a question right? Exact match, with F1 beside it, after the normalisation of SQuAD.

Lower case, no punctuation, no articles, single spaces (Rajpurkar et al., 2016); Unicode's punctuation counts too, and
letters that differ only in their encoding are the same (NFKC). An answer that is only articles keeps them.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from srpo_env.parsers import after_thinking, last_boxed, tagged
from srpo_env.records import Event
from srpo_env.rewards import Score

if TYPE_CHECKING:
    from srpo_env.tasks import Task

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalized(text: str) -> str:
    """Returns the words that are compared.

    >>> normalized("The Beatles!"), normalized("A"), normalized("April 22, 1994")
    ('beatles', 'a', 'april 22 1994')
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(each for each in text if each not in string.punctuation and unicodedata.category(each)[0] != "P")
    return " ".join(_ARTICLES.sub(" ", text).split()) or " ".join(text.split())


def exact(gold: str, prediction: str) -> bool:
    """Whether two answers are the same words in the same order; an empty one is the same as none."""
    words = normalized(prediction)
    return words != "" and words == normalized(gold)


def f1(gold: str, prediction: str) -> float:
    """Returns the harmonic mean of precision and recall of the prediction's words, each counted as often as it stands.

    >>> f1("Oslo", "Oslo Oslo Oslo Oslo"), f1("Hello, world!", "hello there world")
    (0.4, 0.8)
    """
    wanted, given = normalized(gold).split(), normalized(prediction).split()
    common = (Counter(wanted) & Counter(given)).total()
    return 2 * common / (len(wanted) + len(given)) if common else 0.0


def given_answer(text: str) -> str:
    r"""Returns what a reply gives as its answer: the last <answer>...</answer>, else the last \boxed{}, else all of it.

    >>> given_answer("<think><answer>Oslo</answer></think> <answer> Bergen </answer>")
    'Bergen'
    """
    text = after_thinking(text)
    if pairs := tagged(text, ["answer"]):
        _, start, end = pairs[-1]
        return text[start:end].strip()
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed


def qa_exact_match(task: Task, answer: str | None, events: Sequence[Event]) -> Score:
    """1 where the answer matches one of the task's, else 0; the best F1 over them is the measure `f1`."""
    accepted = [text for text in task.answers if normalized(text)]
    if not accepted:
        return Score(value=None, reason="no reference answer")
    given = given_answer(answer or "")
    if not normalized(given):
        return Score(value=0.0, reason="no answer", measures={"f1": 0.0})
    right = any(exact(gold, given) for gold in accepted)
    measures = {"f1": max(f1(gold, given) for gold in accepted)}
    return Score(value=float(right), reason="right" if right else "wrong", measures=measures)
