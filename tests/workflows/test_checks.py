# ruff: noqa: E501 - tables of texts read better unbroken
"""The static checks: what makes no sense is refused at load, with its place and the next step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from srpo_env.errors import InvalidWorkflow, UnknownName
from srpo_env.graph import compile_graph
from srpo_env.loading import load_workflow, set_params
from srpo_env.problems import InvalidWorkflowFile, Problem
from srpo_env.spec import Agent, Node, Workflow

Problems = Callable[[str], tuple[Problem, ...]]

HEAD = """\
name: flow
agents:
  plan: {prompt: "{{ task.problem }}"}
  judge:
    prompt: x
    parse: {tag: verdict, choices: [yes, no], fallback: no}
"""


def whats(found: tuple[Problem, ...]) -> list[tuple[int | None, str]]:
    """Line and what, of each problem."""
    return [(problem.line, problem.what) for problem in found]


def test_a_misspelt_node_is_no_new_node(problems: Problems) -> None:
    found = problems(
        HEAD + "nodes:\n  work: {agents: plan, next: chekc}\n  check: {agents: judge}\nanswer: work.text\n"
    )
    assert whats(found) == [(8, "node 'chekc' does not exist")]
    assert found[0].hint == "Did you mean 'check'?"


def test_a_misspelt_start_is_an_unknown_node(problems: Problems) -> None:
    found = problems(HEAD + "start: wrok\nnodes:\n  work: {agents: plan}\nanswer: '''x'''\n")
    assert whats(found) == [(7, "node 'wrok' does not exist")]


def test_a_node_that_no_edge_leads_to_is_refused(problems: Problems) -> None:
    found = problems(HEAD + "nodes:\n  work: {agents: plan}\n  alone: {agents: judge}\nanswer: work.text\n")
    assert whats(found) == [(9, "node 'alone' can't be reached")]


def test_a_graph_without_a_way_to_the_end_is_refused(problems: Problems) -> None:
    text = "nodes:\n  a: {agents: plan, next: b}\n  b: {agents: plan, next: a}\nanswer: a.text\nlimits: {steps: 4}\n"
    assert whats(problems(HEAD + text)) == [(8, "node 'a' is a dead end"), (9, "node 'b' is a dead end")]


@pytest.mark.parametrize("limits", ["steps: 8", "visits: 3", "visits: {a: 3}", "visits: {b: 3}"])
def test_a_cycle_with_a_limit_is_allowed(problems: Problems, limits: str) -> None:
    text = "nodes:\n  a: {agents: plan, next: b}\n  b:\n    agents: judge\n    next: [{if: b.parsed == 'yes', to: end}, {to: a}]\nanswer: a.text\n"
    assert not problems(HEAD + text + f"limits: {{{limits}}}\n")


@pytest.mark.parametrize("limits", ["", "limits: {tokens: 100}\n", "limits: {visits: {c: 3}}\n"])
def test_a_cycle_without_a_limit_is_refused_at_the_edge_that_closes_it(problems: Problems, limits: str) -> None:
    text = "nodes:\n  a: {agents: plan, next: b}\n  b:\n    agents: judge\n    next: [{if: b.parsed == 'yes', to: c}, {to: a}]\n  c: {agents: plan}\nanswer: a.text\n"
    assert whats(problems(HEAD + text + limits)) == [(11, "the edge from 'b' to 'a' closes a cycle without a limit")]


def test_a_self_loop_needs_a_limit(problems: Problems) -> None:
    text = "nodes:\n  a:\n    agents: judge\n    next: [{if: a.parsed == 'no', to: a}, {to: end}]\nanswer: a.text\n"
    assert whats(problems(HEAD + text)) == [(10, "the edge from 'a' to 'a' closes a cycle without a limit")]
    assert not problems(HEAD + text + "limits: {visits: {a: 3}}\n")


def test_every_entangled_cycle_is_told_once(problems: Problems) -> None:
    nodes = "".join(
        f"  n{i}:\n    agents: judge\n    next: [{{if: n{i}.ok, to: n{(i + 1) % 40}}}, {{if: n{i}.acting, to: n{i}}}, {{to: end}}]\n"
        for i in range(40)
    )
    assert len(problems(HEAD + "nodes:\n" + nodes + "answer: n0.text\n")) == 1


def test_two_conditional_edges_between_the_same_nodes_are_both_kept() -> None:
    workflow = load_workflow(
        {
            "name": "twice",
            "agents": {"a": {"prompt": "x", "parse": {"choices": ["x", "y", "z"], "fallback": "z"}}},
            "nodes": {
                "a": {"agents": "a", "next": [{"if": "a.parsed == 'x'", "to": "b"}, {"if": "a.parsed == 'y'", "to": "b"}, "end"]},
                "b": {"agents": "a"},
            },
            "answer": "a.parsed",
        }
    )  # fmt: skip
    graph = compile_graph(workflow)
    assert [data["condition"] for _, target, data in graph.nx.edges("a", data=True) if target == "b"] == [
        "a.parsed == 'x'",
        "a.parsed == 'y'",
    ]
    assert [arrow.to for arrow in graph.edges["a"]] == ["b", "b", "end"]


WRITERS = """\
name: flow
state:
  draft: {default: ""}
  notes: {default: [], merge: append}
  done: {default: false, merge: any}
agents: {a: {prompt: x}, b: {prompt: y}}
nodes:
  both:
    agents: [a, b]
    write:
      notes: member.text
      done: member.ok
answer: state.notes | length
"""


def test_several_writers_of_a_key_need_a_merge_rule(problems: Problems) -> None:
    assert not problems(WRITERS)
    found = problems(WRITERS.replace("      notes", "      draft: member.text\n      notes"))
    assert whats(found) == [(11, "up to 2 members write 'draft' in one step")]


def test_one_writer_needs_none(problems: Problems) -> None:
    assert not problems(WRITERS.replace("[a, b]", "a").replace("      notes", "      draft: member.text\n      notes"))


def test_a_set_that_may_grow_by_a_param_counts_as_several_writers(problems: Problems) -> None:
    text = "params: {k: {default: 1, min: 1, max: 4}}\n" + WRITERS.replace("[a, b]", "{a: params.k}").replace(
        "      notes", "      draft: member.text\n      notes"
    )
    assert [problem.what for problem in problems(text)] == ["up to 4 members write 'draft' in one step"]


@pytest.mark.parametrize(
    ("key", "hint"), [("max_token", ""), ("promt", "Did you mean 'prompt'?"), ("tool", "Did you mean 'tools'?")]
)
def test_an_unknown_key_is_never_dropped(problems: Problems, key: str, hint: str) -> None:
    found = problems(
        f"name: flow\nagents:\n  a: {{prompt: x, {key}: 100}}\nnodes: {{a: {{agents: a}}}}\nanswer: a.text\n"
    )
    assert (found[0].line, found[0].column) == (3, 18)
    assert found[0].what == f"'{key}' is not a key of an agent"
    assert found[0].hint == hint


def test_free_form_keys_begin_with_x(problems: Problems) -> None:
    assert not problems(
        "x-base: &base {prompt: x}\nname: flow\nagents: {a: *base, b: {<<: *base, parse: boxed}}\nnodes: {a: {agents: [a, b]}}\nanswer: task.id\n"
    )


@pytest.mark.parametrize("word", ["no", "on", "Yes", "off"])
def test_a_boolean_of_old_yaml_is_no_name(problems: Problems, word: str) -> None:
    found = problems(
        f"name: flow\nagents:\n  {word}: {{prompt: x}}\nnodes: {{a: {{agents: {word}}}}}\nanswer: a.text\n"
    )
    assert whats(found) == [(3, f"the name {word} is a boolean to some readers of YAML")]


def test_yes_and_no_are_choices(problems: Problems) -> None:
    assert not problems(
        HEAD + "nodes:\n  a: {agents: judge, next: [{if: a.parsed == 'yes', to: end}, end]}\nanswer: a.parsed\n"
    )


def test_all_problems_are_told_at_once_in_the_order_of_the_file(problems: Problems) -> None:
    found = problems(
        "name: flow\nagents:\n  a: {promt: x, parse: bxed}\n  b: {prompt: '{{ tusk.id }}', parse: {choices: [x]}}\n"
        "nodes:\n  one: {agents: c, next: tow}\n  two: {agents: [a, b], reduce: mojority}\nanswer: one.txt\n"
    )
    assert [problem.line for problem in found] == sorted(problem.line or 0 for problem in found)
    assert [problem.what for problem in found] == [
        "'promt' is not a key of an agent",
        "parser 'bxed' does not exist",
        "'tusk.id' is used, but 'tusk' is not defined",
        "the choices have no fallback",
        "agent 'c' does not exist",
        "node 'tow' does not exist",
        "reducer 'mojority' does not exist",
        "'one.txt' is used",
    ]


def test_the_message_has_a_line_for_each_problem(problems: Problems) -> None:
    with pytest.raises(InvalidWorkflowFile) as caught:
        load_workflow(
            {
                "name": "flow",
                "agents": {"a": {"prompt": "x"}},
                "nodes": {"n": {"agents": "b", "next": "nn"}},
                "answer": "n.text",
            }
        )
    first, second = str(caught.value).splitlines()
    assert first == "flow: nodes.n.agents: agent 'b' does not exist; the agents are a."
    assert second == "flow: nodes.n.next.0.to: node 'nn' does not exist; the nodes are n, end. Did you mean 'n'?"


@pytest.mark.parametrize(
    ("parse", "what"),
    [
        ("{use: choice, choices: [a, b], fallback: a}", "'choice' is no parser to name"),
        ("{use: boxed, tag: v}", "the parser has both `use: boxed` and `tag`"),
        ("{}", "the parser says nothing"),
        ("{choices: [], fallback: a}", "the choices are empty"),
        ("{choices: [a, b], fallback: c}", "choice 'c' does not exist"),
        ("{choices: [1, 2], fallback: null}", "'0' is 1"),
    ],
)
def test_a_parser_says_one_thing(problems: Problems, parse: str, what: str) -> None:
    found = problems(
        f"name: f\nagents:\n  a: {{prompt: x, parse: {parse}}}\nnodes: {{n: {{agents: a}}}}\nanswer: n.parsed\n"
    )
    assert whats(found)[0] == (3, what)


@pytest.mark.parametrize("name", ["my_package.reading:parse", "./reading.py:parse"])
def test_a_function_of_ones_own_is_named_and_not_imported(problems: Problems, name: str) -> None:
    assert not problems(
        f"name: f\nstate: {{s: {{merge: '{name}'}}}}\nagents: {{a: {{prompt: x, parse: '{name}', tools: ['{name}']}}}}\n"
        f"nodes:\n  n: {{agents: [a, a], reduce: '{name}', write: {{s: member.text}}, next: m}}\n"
        f"  m: {{agents: [a, a], transition: '{name}', next: [n, end]}}\nanswer: n.parsed\nlimits: {{steps: 4}}\n"
    )


# Variables.


def flow(
    verify_prompt: str = "x",
    solve_prompt: str = "x",
    edge: str = "true",
    answer: str = "solve.text",
    many: bool = False,
) -> str:
    """A solver and a verifier in a loop."""
    agents = "{solver: 3}" if many else "solver"
    return (
        f"name: flow\nstate: {{notes: 0}}\nagents:\n  solver: {{prompt: '{solve_prompt}'}}\n  verifier: {{prompt: '{verify_prompt}'}}\n"
        f"nodes:\n  solve: {{agents: {agents}, next: verify}}\n  verify: {{agents: verifier, next: [{{if: '{edge}', to: end}}, {{to: solve}}]}}\n"
        f"answer: {answer}\nlimits: {{steps: 4}}\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        flow(verify_prompt="{{ solve.text }}"),
        flow(solve_prompt="{% if verify %}{{ verify.text }}{% endif %}"),
        flow(edge="verify.ok and solve.ok and visits.solve > 1"),
        flow(answer="verify.text"),
        flow(
            solve_prompt="{{ member.index }} of {{ member.count }}: {{ member.results | length }} {{ task.meta.level }} {{ state.notes }}"
        ),
        flow(many=True, verify_prompt="{{ solve.outputs[0].text }} {{ solve.visits }}", answer="verify.text"),
    ],
)
def test_what_is_there_may_be_used(problems: Problems, text: str) -> None:
    assert not problems(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (flow(solve_prompt="{{ verify.text }}"), "'verify.text' is used unguarded"),
        (flow(verify_prompt="{{ verify.text }}"), "'verify.text' is used unguarded"),
        (flow(verify_prompt="{{ solve }}"), "'solve' is printed whole"),
        (flow(verify_prompt="{{ solve.txet }}"), "'solve.txet' is used"),
        (flow(verify_prompt="{{ solver.text }}"), "'solver.text' is used, but 'solver' is not defined"),
        (flow(verify_prompt="{{ notes }}"), "'notes' is used, but 'notes' is not defined"),
        (flow(verify_prompt="{{ state.note }}"), "'state.note' is used"),
        (flow(verify_prompt="{{ member.text }}"), "'member.text' is used"),
        (flow(edge="member.index"), "'member' is used"),
        (flow(edge="visits.slove"), "'visits.slove' is used"),
        (flow(answer="member.text"), "'member' is used"),
        (flow(many=True, verify_prompt="{{ solve.text }}", answer="verify.text"), "'solve.text' is used"),
        (
            flow(many=True, verify_prompt="{{ solve.outputs.text }}", answer="verify.text"),
            "'solve.outputs.text' is used",
        ),
        (flow(verify_prompt="{% for o in solve.outputs %}{{ o.txt }}{% endfor %}"), "'solve.outputs[...].txt' is used"),
        (flow(verify_prompt='{{ solve.outputs | map(attribute="txt") | list }}'), "'solve.outputs[...].txt' is used"),
    ],
)
def test_what_is_not_there_may_not(problems: Problems, text: str, what: str) -> None:
    assert [problem.what for problem in problems(text)] == [what]


def test_an_agent_of_two_nodes_is_guarded_at_both(problems: Problems) -> None:
    text = "name: flow\nagents: {a: {prompt: '{{ one.text }}'}, b: {prompt: x}}\nnodes:\n  one: {agents: b, next: two}\n  two: {agents: a, next: three}\n  three: {agents: a}\nanswer: three.text\n"
    assert not problems(text)
    assert [problem.line for problem in problems(text.replace("one: {agents: b", "one: {agents: a"))] == [2]


def test_a_node_that_a_branch_leaves_out_must_be_guarded(problems: Problems) -> None:
    text = (
        "name: flow\nagents: {a: {prompt: x}, b: {prompt: '{{ side.text }}'}}\nnodes:\n  one: {agents: a, next: [{if: one.ok, to: side}, {to: last}]}\n"
        "  side: {agents: a, next: last}\n  last: {agents: b}\nanswer: last.text\n"
    )
    assert [problem.what for problem in problems(text)] == ["'side.text' is used unguarded"]


# Params.


def test_params_are_set_and_checked() -> None:
    workflow = load_workflow("parallel_proposers")
    assert compile_graph(set_params(workflow, {"proposers": 5})).k_max == 5
    for values, message in (
        ({"proposers": 0}, "it is from 1 to 64"),
        ({"propsers": 3}, "Did you mean 'proposers'"),
        ({"proposers": "3"}, "a number"),
    ):
        with pytest.raises(InvalidWorkflow, match=message):
            set_params(workflow, values)
    assert workflow.params["proposers"].default == 3


def test_a_value_that_breaks_the_workflow_is_refused(problems: Problems) -> None:
    workflow = load_workflow(
        {
            "name": "f",
            "params": {"k": 1},
            "agents": {"a": {"prompt": "x"}},
            "nodes": {"n": {"agents": {"a": "params.k"}}},
            "answer": "n.text",
        }
    )
    with pytest.raises(InvalidWorkflow, match="0 members"):
        set_params(workflow, {"k": 0})
    with pytest.raises(InvalidWorkflow, match="no reducer"):
        set_params(workflow, {"k": 2})


@pytest.mark.parametrize("name", ["parallel_proposer", "tiny/solver", "../secret", "/etc/passwd"])
def test_an_unknown_name_is_told_with_the_nearest(name: str) -> None:
    with pytest.raises(UnknownName, match="known are"):
        load_workflow(name)


def test_a_file_that_is_missing_or_no_text_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidWorkflow, match="No such file"):
        load_workflow(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"name: x\nagents: \xff\xfe")
    with pytest.raises(InvalidWorkflow, match=r"bad.yaml:2:9: not UTF-8"):
        load_workflow(str(tmp_path / "bad.yaml"))


# Python.


def test_a_workflow_is_built_in_python_and_dumped() -> None:
    workflow = Workflow(
        name="built",
        params={"k": 2},
        agents={"a": Agent(prompt="{{ task.problem }}\n\nno", parse="boxed")},
        nodes={"n": Node(agents={"a": "params.k"}, reduce="majority", next="end")},
        answer="n.parsed",
    )
    text = workflow.to_yaml()
    assert "prompt: |" in text
    assert "parse: boxed" in text
    assert compile_graph(workflow).k_max == 2


def test_a_workflow_built_in_python_is_checked_too() -> None:
    workflow = Workflow(
        name="built", agents={"a": Agent(prompt="{{ m.text }}")}, nodes={"n": Node(agents="a")}, answer="n.text"
    )
    with pytest.raises(InvalidWorkflowFile, match=r"built: agents.a.prompt: 'm.text' is used, but 'm' is not defined"):
        compile_graph(workflow)
