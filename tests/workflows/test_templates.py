# ruff: noqa: E501 - tables of texts read better unbroken
"""Templates and expressions: what they give, what they refuse, and what is known of their variables."""

import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.templates import TemplateError, compile_expression, compile_template, parse_expression, parse_template
from srpo_env.variables import variables_of


@dataclass(frozen=True)
class View:
    """What a node shows."""

    text: str
    parsed: object = None
    outputs: tuple[object, ...] = ()

    def method(self) -> None:
        """Can't be seen."""


SCOPE = {
    "verify": View("no good", "reject"),
    "solve": View("x", outputs=(View("a", 1), View("b", None))),
    "unvisited": None,
    "visits": {"solve": 2, "verify": 1, "unvisited": 0},
    "params": {"rounds": 2, "items": 7},
    "state": {"notes": ["a", "b"]},
}


def test_a_line_with_nothing_but_a_tag_leaves_no_line() -> None:
    text = "a\n{% if verify %}\nlast: {{ verify.text }}\n{% endif %}\n{# a remark #}\n  {% if unvisited %}\nno\n  {% endif %}\nb\n"
    assert compile_template(text).render(SCOPE) == "a\nlast: no good\nb"


def test_a_tag_inside_a_line_keeps_the_line() -> None:
    assert compile_template("a\n{% if verify %}x{% endif %}\nb").render(SCOPE) == "a\nx\nb"


def test_the_text_of_a_model_is_data() -> None:
    scope = {"solve": View("{{ 7 * 7 }} {% if x %} <|im_start|>system ${x} \ud800")}
    assert compile_template("{{ solve.text }}").render(scope) == "{{ 7 * 7 }} {% if x %} <|im_start|>system ${x} \ud800"


def test_text_is_not_escaped() -> None:
    assert (
        compile_template("{{ solve.text }} {{ state.notes | tojson }}").render(
            {"solve": View("<a & b>"), "state": {"notes": ["<é>"]}}
        )
        == '<a & b> ["<é>"]'
    )


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ('verify.parsed == "approve" or visits.solve >= params.rounds', True),
        ("visits.unvisited", 0),
        ("params.items", 7),
        ("solve.outputs | length", 2),
        ("solve.outputs[0].parsed", 1),
        ("solve.outputs | map(attribute='text') | join('+')", "a+b"),
        ("solve.outputs | selectattr('parsed', 'none') | list | length", 1),
        ("unvisited and unvisited.text", None),
        ("unvisited.text | default('none yet')", "none yet"),
        ("unvisited.text is defined", False),
        ("2 * params.rounds + 1", 5),
        ("'b' in state.notes", True),
        ("{'a': 1}", {"a": 1}),
    ],
)
def test_an_expression_gives_a_python_value(expression: str, value: object) -> None:
    assert compile_expression(expression).evaluate(SCOPE) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "{{ verify.text.upper() }}",
            "{{ range(10**9) }}",
            "{{ lipsum }}",
            "{{ self }}",
            "{{ verify.method }}",
            "{{ verify.__class__ }}",
        ),
        *(
            "{{ verify['__class__'] }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ verify.text.format }}",
            "{{ '%s' % verify }}",
            "{{ 'a' * 10**9 }}",
        ),
        *(
            "{{ 2 ** 999999999 }}",
            "{% set x = 1 %}",
            "{% include 'x' %}",
            "{% macro a() %}{% endmacro %}",
            "{% for c in verify.text %}{% endfor %}",
        ),
        *(
            "{{ state.notes.append }}",
            "{{ params.keys }}",
            "{{ x | attr('y') }}",
            "{{ x | format }}",
            "{{ x | xmlattr }}",
            "{{ 'a' | center(10**9) }}",
        ),
        *("{% for a in b recursive %}{% endfor %}", "{% extends 'x' %}", "{{ cycler }}"),
    ],
)
def test_a_template_can_neither_call_nor_reach_what_is_not_data(text: str) -> None:
    with pytest.raises(TemplateError):
        compile_template(text).render(SCOPE)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}{% endfor %}{% endfor %}",
            "{% for a in m %}x{% endfor %}",
        ),
        *(
            "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
            "{{ " + "not " * 5000 + "1 }}",
            "{% if x %}" * 500 + "{% endif %}" * 500,
        ),
        *(
            "{{ t | replace('a', t) | replace('a', t) }}",
            "{{ m | join(t) }}",
            "{% for a in l %}{% for b in l %}{{ t }}{% endfor %}{% endfor %}",
        ),
    ],
)
def test_a_template_is_bounded(text: str) -> None:
    scope = {"l": list(range(1000)), "m": list(range(1001)), "t": "a" * 100_000, "x": 1}
    started = time.perf_counter()
    with pytest.raises(TemplateError):
        compile_template(text).render(scope)
    assert time.perf_counter() - started < 5


def test_a_long_text_passes_through_a_template() -> None:
    assert len(compile_template("{{ verify.text }}").render({"verify": View("x" * 1_000_000)})) == 1_000_000


def test_a_field_of_a_node_that_was_not_visited_is_an_error_with_its_line() -> None:
    with pytest.raises(TemplateError, match=r"line 3.*not visited") as caught:
        compile_template("a\n\n{{ unvisited.text }}").render(SCOPE)
    assert caught.value.line == 3


def test_an_expression_in_error_names_itself() -> None:
    with pytest.raises(TemplateError, match=r"`unvisited >= 1`"):
        compile_expression("unvisited >= 1").evaluate(SCOPE)


def test_a_text_is_compiled_once() -> None:
    assert compile_expression("visits.solve") is compile_expression("visits.solve")


def test_evaluation_takes_microseconds() -> None:
    expression = compile_expression('verify.parsed == "approve" or visits.solve >= params.rounds')
    best = min(_seconds(lambda: expression.evaluate(SCOPE)) for _ in range(50))
    assert best < 200e-6


def _seconds(call: object) -> float:
    assert callable(call)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# Variables.


def unguarded(text: str) -> set[str]:
    """The paths that a template uses unguarded."""
    uses = variables_of(parse_template(text)).uses
    return {
        ".".join(use.path)
        for use in uses
        if not use.guarded and use.path[0] not in ("visits", "params", "state", "task")
    }


@pytest.mark.parametrize(
    "text",
    [
        "{% if v %}{{ v.text }}{% endif %}",
        "{% if not v %}-{% else %}{{ v.text }}{% endif %}",
        "{% if v is none %}-{% elif x %}{{ v.text }}{% else %}{{ v.parsed }}{% endif %}",
        "{% if x %}-{% elif not v %}-{% else %}{{ v.text }}{% endif %}",
        "{% if v is not none %}{{ v.text }}{% endif %}",
        "{% if v != none and v.ok %}{{ v.text }}{% endif %}",
        "{% if x and v %}{{ v.text }}{% endif %}",
        "{% if not x or not v %}-{% else %}{{ v.text }}{% endif %}",
        "{% if visits.v %}{{ v.text }}{% endif %}",
        "{% if visits.v > 0 %}{{ v.text }}{% endif %}",
        "{% if visits.v == 0 %}-{% else %}{{ v.text }}{% endif %}",
        "{{ v.text if v else '-' }}",
        "{{ v and v.text }}",
        "{{ not v or v.text }}",
        "{{ v.text | default('-') }}",
        "{{ v.text | default('-') | upper }}",
        "{% if v.text is defined %}{{ v.text }}{% endif %}",
        "{% if v %}{% for o in v.outputs %}{{ o.text }}{% endfor %}{% endif %}",
        "{% for v in state.notes %}{{ v.text }}{% endfor %}",
        "{% if (v and x) or (x and v) %}{{ v.text }}{% endif %}",
    ],
)
def test_guards_are_understood(text: str) -> None:
    assert unguarded(text) == set()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("{{ v.text }}", "v.text"),
        ("{% if v or x %}{{ v.text }}{% endif %}", "v.text"),
        ("{% if not v %}{{ v.text }}{% endif %}", "v.text"),
        ("{% if v %}-{% endif %}{{ v.text }}", "v.text"),
        ("{% if v is none or x %}{% else %}{% endif %}{{ v.parsed }}", "v.parsed"),
        ("{% if visits.v >= 0 %}{{ v.text }}{% endif %}", "v.text"),
        ("{{ v.text or 'x' }}", "v.text"),
        ("{% if v.ok %}x{% endif %}", "v.ok"),
        ("{{ v.text | upper }}", "v.text"),
        ("{% for o in v.outputs %}{% endfor %}", "v.outputs"),
        ("{{ x[v.parsed] }}", "v.parsed"),
        ("{{ v['text'] }}", "v.text"),
    ],
)
def test_what_is_no_guard_is_no_guard(text: str, path: str) -> None:
    assert path in unguarded(text)


_ATOMS = st.sampled_from(
    ["v", "w", "v is none", "w is not none", "visits.v > 0", "visits.w == 0", "v.ok", "w.ok", "x", "v != none"]
)
_LOGIC = st.recursive(
    _ATOMS, lambda inner: st.builds("({} and {})".format, inner, inner) | st.builds("({} or {})".format, inner, inner) | st.builds("not ({})".format, inner), max_leaves=6
)  # fmt: skip


@given(_LOGIC, st.sampled_from([None, View("v")]), st.sampled_from([None, View("w")]), st.booleans())
def test_an_expression_whose_uses_are_all_guarded_never_fails(logic: str, v: object, w: object, x: bool) -> None:
    text = f"({logic}) and v.text == 'v' or not ({logic}) and w.text == 'w'".replace(".ok", ".text")
    uses = variables_of(parse_expression(text)).uses
    scope = {"v": v, "w": w, "x": x, "visits": {"v": int(v is not None), "w": int(w is not None)}}
    if all(use.guarded for use in uses if use.path[0] in ("v", "w")):
        compile_expression(text).evaluate(scope)
