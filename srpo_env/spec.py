"""The words of a workflow: pydantic models of the YAML grammar.

The same classes build a workflow in Python; `Workflow.to_yaml` writes one. What they accept is the grammar's form;
whether the graph makes sense (names, cycles, variables) is decided by `srpo_env.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    WithJsonSchema,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

SCOPE = ("task", "params", "visits", "member", "state")
"""Names that templates and conditions can use beside the nodes."""

RESERVED = frozenset({*SCOPE, "end"})
"""Names with a meaning of their own; no node or agent may take them."""

EXPRESSION_CHARS = 500
MOST_MEMBERS = 1000

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=64)]
Expression = Annotated[str, Field(min_length=1, max_length=EXPRESSION_CHARS)]
"""A Jinja expression, such as `verify.parsed == "approve" or visits.solve >= params.rounds`."""
Reference = Annotated[str, Field(pattern=r"^[^\s:]+:[A-Za-z_][A-Za-z0-9_.]*$")]
"""`package.module:attr` or `./file.py:attr`."""

MERGES = ("append", "extend", "any", "all", "sum", "min", "max", "first", "last")


def _merge_rule(rule: str) -> str:
    if rule not in MERGES and ":" not in rule:
        raise PydanticCustomError("form", f"a merge rule is {', '.join(MERGES)}, or `module:attr`")
    return rule


Merge = Annotated[
    str,
    AfterValidator(_merge_rule),
    WithJsonSchema({"anyOf": [{"enum": list(MERGES)}, {"type": "string", "pattern": ":"}]}),
]

FORMS = frozenset({"(number)", "(text)", "(list)", "(mapping)", "(choose)", "(acting)", "[key]"})
"""Parts of a pydantic error's location that stand for a form, not for a key of the file."""


def _form(value: Any) -> str | None:
    """The form in which a value is written: what decides between the alternatives of a union."""
    if isinstance(value, str):
        return "(text)"
    if isinstance(value, int) and not isinstance(value, bool):
        return "(number)"
    if isinstance(value, list | tuple):
        return "(list)"
    if isinstance(value, Mapping | Best):
        return "(mapping)"
    return None


def _members_form(value: Any) -> str | None:
    if isinstance(value, Choose) or (isinstance(value, Mapping) and not value.keys().isdisjoint(("choose", "among"))):
        return "(choose)"
    if isinstance(value, Acting) or (isinstance(value, Mapping) and "acting" in value):
        return "(acting)"
    return _form(value)


def _by_form(rule: str, form: Callable[[Any], str | None] = _form) -> Discriminator:
    return Discriminator(form, custom_error_type="form", custom_error_message=rule)


def _scalar(value: Any) -> Any:
    if value is not None and not isinstance(value, str | int | float | bool):
        raise PydanticCustomError("form", "this is text, a number, true, false or null")
    return value


_SCALAR_SCHEMA = {"type": ["string", "number", "boolean", "null"]}
Scalar = Annotated[str | int | float | bool | None, BeforeValidator(_scalar), WithJsonSchema(_SCALAR_SCHEMA)]

Count = Annotated[
    Annotated[int, Field(ge=0), Tag("(number)")] | Annotated[Expression, Tag("(text)")],
    _by_form("this is a whole number, or an expression of params that gives one"),
]
"""A number, or an expression of params that gives one."""

Group = Annotated[
    Annotated[Name, Tag("(text)")]
    | Annotated[tuple[Name, ...], Tag("(list)")]
    | Annotated[dict[Name, Count], Tag("(mapping)")],
    _by_form("a set is one agent, a list of agents, or counts such as {searcher: 5}"),
]
"""Members by name: one agent, a list, or counts."""


class Part(BaseModel):
    """Base of the grammar: unknown keys are refused, parts don't change once made."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        populate_by_name=True,
        allow_inf_nan=False,
    )


class ShortPart(Part):
    """A part that may be written as the value of one key: `rounds: 2` for `rounds: {default: 2}`."""

    short: ClassVar[str]
    short_schema: ClassVar[dict[str, Any]] = {"type": "string"}

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, value: Any) -> Any:
        return value if isinstance(value, Mapping | cls) else {cls.short: value}

    @model_serializer(mode="wrap")
    def _short_form(self, handler: Callable[[Self], dict[str, Any]]) -> Any:
        written = handler(self)
        short = written.keys() == {self.short} and not isinstance(written[self.short], Mapping)
        return written[self.short] if short else written

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        long_form = handler.resolve_ref_schema(handler(schema))
        description = long_form.pop("description", "")
        return {"description": description, "anyOf": [cls.short_schema, long_form]}


class Param(ShortPart):
    """A value that a recipe, `make(..., name=value)` or an override may change. In short: its default."""

    short = "default"
    short_schema = _SCALAR_SCHEMA

    default: Scalar
    """Value unless it is set."""
    min: int | float | None = None
    """Smallest allowed value."""
    max: int | float | None = None
    """Largest allowed value."""
    choices: tuple[Scalar, ...] | None = None
    """The only allowed values."""


class Parser(ShortPart):
    """How an output is read. In short: the name of a parser, such as `boxed`."""

    short = "use"

    use: str | None = None
    """Name of a parser (text, answer, boxed, number) or `module:attr`; may be left out beside `tag` or `choices`."""
    tag: Name | None = None
    """Reads what stands between <tag> and </tag>, the only such pair outside quoted text."""
    choices: tuple[str, ...] | None = None
    """The only values that are accepted, compared exactly after white-space around them is stripped."""
    fallback: Scalar = None
    """Taken, and recorded as a failed parse, where nothing acceptable was found; required beside `choices`."""


class Agent(Part):
    """A role: what it is asked, and how its answer is read."""

    policy: str = Field("main", min_length=1)
    """Label of the policy that samples it; the recipe says what that is."""
    system: str | None = None
    """Template of a system message."""
    prompt: str = Field(min_length=1)
    """Template of the user message (Jinja)."""
    parse: Parser = Parser(use="text")
    """How its output is read."""
    history: Literal["none", "own", "team"] = "none"
    """What it sees of the past: nothing (a fresh prompt each visit), its own earlier turns as chat, or the team's."""
    tools: tuple[str, ...] = ()
    """Tools that it may call."""


class Choose(Part):
    """A set that is chosen while the episode runs, by what a router said."""

    choose: Expression
    """Gives one of the keys of `among`, such as `route.parsed`."""
    among: dict[str, Group] = Field(min_length=1)
    """The set for each choice."""
    fallback: Group | None = Field(None, alias="else")
    """The set for any other value, and for a choice whose set is empty."""


class Acting(Part):
    """The members that still act: all on arrival; in a loop, those whose last output called a tool."""

    acting: Group
    """The set on arrival."""


Members = Annotated[
    Annotated[Name, Tag("(text)")]
    | Annotated[tuple[Name, ...], Tag("(list)")]
    | Annotated[dict[Name, Count], Tag("(mapping)")]
    | Annotated[Choose, Tag("(choose)")]
    | Annotated[Acting, Tag("(acting)")],
    _by_form(
        "a set is one agent, a list of agents, counts such as {searcher: 5}, `choose`, or `acting`",
        _members_form,
    ),
]


class Best(Part):
    """Takes the member with the highest score; the first of equals."""

    best: Expression
    """Score of a member, such as `member.parsed | length`."""


class Edge(ShortPart):
    """Where the walk goes. In a list the first edge whose condition holds is taken; the last one has none."""

    short = "to"

    condition: Expression | None = Field(None, alias="if")
    """Taken where this holds; left out: always."""
    to: Name
    """A node, or `end`."""


class Node(Part):
    """A decision: an active set, what is made of it, and where the walk goes."""

    agents: Members
    """The active set: one agent, a list, counts ({searcher: 5}), `choose`, or `acting`."""
    reduce: (
        Annotated[
            Annotated[str, Tag("(text)")] | Annotated[Best, Tag("(mapping)")],
            _by_form("a reducer is a name, `module:attr`, or {best: score}"),
        ]
        | None
    ) = None
    """Makes one value of the set: majority, first_valid, concat, {best: score} or `module:attr`."""
    write: dict[Name, Expression] = {}
    """State keys set by each member, in declared order; every expression sees the state before the step."""
    transition: Reference | None = None
    """A Python function in place of reduce; it may also write state and choose among the targets of `next`."""
    next: tuple[Edge, ...] = (Edge(to="end"),)
    """Where the walk goes: a node, `end`, or a list of edges."""

    @field_validator("next", mode="before", json_schema_input_type=Edge | tuple[Edge, ...])
    @classmethod
    def _one_edge(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str | Mapping | Edge) else value

    @field_serializer("next", mode="wrap")
    def _short_next(self, value: Any, handler: Callable[[Any], Any]) -> Any:
        written = handler(value)
        return written[0] if len(written) == 1 and isinstance(written[0], str) else written


class StateKey(ShortPart):
    """A value that nodes write and templates read. In short: its default."""

    short = "default"
    short_schema: ClassVar[dict[str, Any]] = {"type": ["string", "number", "boolean", "null", "array"]}

    default: Any = None
    """Value at the start of an episode."""
    merge: Merge | None = None
    """How the writes of several members meet; needed where a set of more than one writes the key."""


class Limits(Part):
    """Where an episode is cut off. Reaching one truncates, with the reason; an edge to `end` in the same step wins."""

    steps: Count | None = None
    """Most events of an episode."""
    visits: (
        Annotated[
            Annotated[int, Field(ge=0), Tag("(number)")]
            | Annotated[Expression, Tag("(text)")]
            | Annotated[dict[Name, Count], Tag("(mapping)")],
            _by_form("this is a number or expression for every node, or a mapping of nodes to such"),
        ]
        | None
    ) = None
    """Most visits to each node, or to the named ones."""
    tokens: Count | None = None
    """Most sampled tokens of an episode."""


class Workflow(Part):
    """A team of agents as a graph: nodes are decisions, edges are transitions."""

    srpo_env: Literal[1] = 1
    """Version of the grammar."""
    name: Name
    """What the workflow is called."""
    description: str = ""
    """One or two sentences for lists and drawings."""
    params: dict[Name, Param] = {}
    """Values that may be set from outside."""
    state: dict[Name, StateKey] = {}
    """Keys that nodes write."""
    agents: dict[Name, Agent] = Field(min_length=1)
    """The roles."""
    nodes: dict[Name, Node] = Field(min_length=1)
    """The decisions."""
    start: Name | None = None
    """The first node; left out: the first one declared."""
    answer: Expression
    """The team's answer, such as `solve.parsed`."""
    limits: Limits = Limits()
    """Where an episode is cut off."""

    @model_validator(mode="after")
    def _first_node(self) -> Workflow:
        if self.start is None:
            object.__setattr__(self, "start", next(iter(self.nodes)))
        return self

    @property
    def first(self) -> str:
        """The first node."""
        assert self.start is not None
        return self.start

    def to_yaml(self) -> str:
        """Returns the workflow as YAML text; loading it gives an equal workflow."""
        from srpo_env.yaml_source import write_yaml

        written = {
            "srpo_env": self.srpo_env,
            **self.model_dump(mode="json", by_alias=True, exclude_unset=True),
        }
        return write_yaml(written)


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of a workflow file, for editors."""
    made: dict[str, Any] = _any_of(Workflow.model_json_schema(by_alias=True))
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["patternProperties"] = {"^x-": {"description": "Free-form: a place for YAML anchors. Ignored."}}
    return made


def _any_of(schema: Any) -> Any:
    """Every oneOf as anyOf: alternatives told apart by their form overlap for who does not know forms."""
    if isinstance(schema, list):
        return [_any_of(item) for item in schema]
    if isinstance(schema, dict):
        return {"anyOf" if key == "oneOf" else key: _any_of(value) for key, value in schema.items()}
    return schema
