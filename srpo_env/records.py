"""What is recorded: an event, its members, and what was done with their outputs.

The records are frozen pydantic models: checked once where they enter, trusted afterwards, and published as a JSON
Schema by `Event.model_json_schema()`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

SCHEMA_VERSION = 1

FinishReason = Literal["stop", "length"]
LogprobsMode = Literal["processed", "raw"]
TruncationReason = Literal["steps", "visits", "tokens", "context", "policy_error", "tool_unavailable"]
"""Why an episode was cut off: a limit of the workflow (steps, visits of a node, the token budget), the policy's context
length, or a policy that failed after all its retries (the episode is then unscored: nobody answered wrongly)."""

MODEL_CAUSED = frozenset[str]({"steps", "visits", "tokens", "context"})


def well_formed(text: Any) -> Any:
    """Replaces lone surrogates in a text by U+FFFD: no file, terminal or tokenizer takes them."""
    if isinstance(text, str) and not text.isascii():
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


Text = Annotated[str, BeforeValidator(well_formed)]
"""Any text; lone surrogates are replaced by U+FFFD."""


def as_json(value: Any) -> Any:
    """Returns what JSON can hold of a value; of anything else its text, such as `nan` for what is no number."""
    if isinstance(value, str):
        return well_formed(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {well_formed(str(key)): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return well_formed(str(value))


Json = Annotated[Any, BeforeValidator(as_json)]
"""Plain data that JSON can hold; of anything else its text, such as `nan` for what is no number."""


# What pydantic's model_construct sets, too; by the slots themselves, since a record is frozen.
_set_fields, _set_given, _set_extra, _set_private = (
    vars(BaseModel)[slot].__set__
    for slot in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


@cache
def _names(kind: type[BaseModel]) -> set[str]:
    """The names of a record's fields; all records of a class share the set."""
    return set(kind.model_fields)


class Record(BaseModel):
    """Base of what is recorded: frozen, and no unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    @classmethod
    def of_checked(cls, fields: dict[str, Any]) -> Self:
        """Returns a record of fields that are known to be right: all of them, in the order in which they are declared.

        Nothing is checked or copied; `fields` becomes the record. A walk makes thousands of records a second, and
        checks would take several times as long as this.
        """
        record = object.__new__(cls)
        _set_fields(record, fields)
        _set_given(record, _names(cls))
        _set_extra(record, None)
        _set_private(record, None)
        return record


class Message(Record):
    """One turn of a chat, as it is given to the chat template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text


class Sampling(Record):
    """How an output is sampled.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token. Log-probs are of the tempered distribution.
        top_p: Keeps the smallest set of tokens with at least this probability; 1 keeps all.
        top_k: Keeps this many most likely tokens; 0 keeps all.
        max_tokens: Longest output, in tokens, the stop token included.
        stop: Strings that end an output once its text holds one of them.
    """

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(256, ge=1)
    stop: tuple[str, ...] = ()


class Output(Record):
    """One sampled response, as a policy gives it.

    Attributes:
        text: The decoded output without special tokens.
        prompt_ids: Token ids that the policy was given; None where the backend does not tell.
        output_ids: Sampled token ids, the stop token included where it was sampled; never re-tokenised text.
        logprobs: Log-prob of each output id; same length as `output_ids`.
        logprobs_mode: `processed`: of the distribution that was sampled (after temperature); `raw`: before it.
        finish_reason: `stop` or `length`; None where unknown.
        policy_version: Number of weight updates that the sampling weights had seen.
        seconds: Wall-clock seconds that the sampling took.
        attempts: Calls made for this output, the successful one included.
    """

    text: Text
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    logprobs_mode: LogprobsMode = "processed"
    finish_reason: FinishReason | None = None
    policy_version: int = 0
    seconds: float = 0.0
    attempts: int = 1


class Parse(Record):
    """What a parser read from an output: `ok` is false where the declared fallback was taken."""

    ok: bool
    value: Json = None
    error: Text | None = None


class ToolCall(Record):
    """One call that an output made, and what came back.

    Attributes:
        result: What the agent reads; of one that is too long, its beginning and its end.
        ok: Whether the call succeeded.
        unavailable: Whether it failed for no fault of the agent's: the episode is then truncated, and not scored.
        cut: Characters that were left out of the result.
    """

    tool: Text
    arguments: Annotated[dict[str, Any], BeforeValidator(as_json)]
    result: Text
    ok: bool = True
    unavailable: bool = False
    cut: int = 0
    seconds: float = 0.0


class Member(Record):
    """One output inside an active set, with where it came from and what was read from it.

    Attributes:
        agent: Role in the workflow.
        index: Which of the set's members of that agent, from 0.
        turn: Earlier outputs of (agent, index) in this episode.
        policy: Label of the policy that sampled it.
        messages: The rendered prompt.
        sampling: The settings it was sampled with; None for an output given by hand.
    """

    agent: str
    index: int
    turn: int
    policy: str
    messages: tuple[Message, ...]
    sampling: Sampling | None
    output: Output
    parse: Parse
    tool_calls: tuple[ToolCall, ...] = ()
    error: Text | None = None
    """Why there is no output: the prompt left no room, or the policy failed. The output is then empty."""
    extends: bool | None = None
    """Whether `prompt_ids` begin with the ids of the member's last turn, prompt and output; None where its messages do
    not go on from it, or there are no ids."""


def _utc(seconds: float) -> float:
    return round(seconds, 6)


Seconds = Annotated[float, PlainSerializer(_utc)]


class Event(Record):
    """One transition: the active set, what the environment did with it, and the reward.

    Attributes:
        run: Id of the run that logged it.
        batch: What it was sampled for, such as `update-12` or `eval-0`.
        task: Id of the task.
        group: Id of the group: the episodes of one task in one batch share it, the baseline of relative advantages.
        episode: Id of the episode.
        step: Number of events before it in the episode.
        node: The node whose active set was consumed.
        visit: Earlier visits to that node in the episode.
        members: The active set, in declared order.
        value: What the node's reducer made of the set (the member's own parsed value where K = 1).
        next_node: Where the walk went; `end` where it ended.
        state_before, state_after: Digests of the walk's state.
        reward: 0.0 before the last event; there the score, None for an unscorable answer.
        score_reason: Why the last event was scored so.
        measures: Further figures of the answer by name, such as f1; in the last event of those whose reward has some.
        truncated_by: Reason of a truncation.
        started, ended: Seconds since the epoch.
    """

    schema_version: Literal[1] = 1
    run: str
    batch: str = ""
    task: str
    group: str
    episode: str
    step: int
    node: str
    visit: int
    members: tuple[Member, ...]
    value: Json = None
    next_node: str
    state_before: str
    state_after: str
    reward: float | None
    score_reason: Text | None = None
    measures: dict[str, float] = Field(default_factory=dict)
    answer: Text | None = None
    terminated: bool
    truncated: bool
    truncated_by: TruncationReason | None = None
    started: Seconds = 0.0
    ended: Seconds = 0.0

    @property
    def id(self) -> str:
        """Unique in a run: episode and step."""
        return f"{self.episode}/{self.step}"

    def comparable(self) -> str:
        """Returns the event as JSON text, without the run, times, seconds and attempts: NaN equals NaN in it."""
        return self.model_dump_json(exclude=_INCOMPARABLE)

    def __eq__(self, other: object) -> bool:
        """Whether all but the run, the times, the seconds and the attempts are equal."""
        return isinstance(other, Event) and self.comparable() == other.comparable()

    def __hash__(self) -> int:
        return hash(self.id)


_INCOMPARABLE: Any = {
    "run": True,
    "started": True,
    "ended": True,
    "members": {"__all__": {"output": {"seconds", "attempts"}, "tool_calls": {"__all__": {"seconds"}}}},
}
