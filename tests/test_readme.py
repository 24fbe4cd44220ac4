"""Does the code of the README run, and does it give what it says?"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {number}" for number in range(1, len(BLOCKS) + 1)])
def test_code_in_the_readme_runs_and_gives_what_its_comments_say(block: str) -> None:
    scope: dict[str, Any] = {}
    lines = block.splitlines()
    for statement in ast.parse(block).body:
        code = ast.unparse(statement)
        if not isinstance(statement, ast.Expr):
            exec(code, scope)
            continue
        given = eval(code, scope)
        comment = lines[(statement.end_lineno or 1) - 1].partition("  # ")[2].strip()
        if comment and "..." not in comment:
            assert given == ast.literal_eval(comment)
        elif comment:
            assert repr(given).startswith(comment.partition("...")[0])


def test_the_workflow_in_the_readme_is_the_one_that_ships() -> None:
    from srpo_env.loading import workflow_files

    assert YAML[0].strip() == workflow_files()["solver_verifier"].read_text(encoding="utf-8").strip()


def test_the_recipes_of_the_page_on_scale_are_recipes() -> None:
    from srpo_env.config import check_recipe

    page = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        check_recipe(yaml.safe_load(block), "docs/scale.md")


def test_the_server_lines_of_the_page_on_scale_are_those_that_a_dry_run_prints() -> None:
    from srpo_env.agents.serving import vllm_commands

    page = (Path(__file__).resolve().parents[1] / "docs" / "scale.md").read_text(encoding="utf-8")
    use = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[1])["policies"]["main"]
    sample = use["sample"]
    lines = vllm_commands(sample["urls"], use["model"], dtype=use["dtype"], sync=sample["sync"])
    assert re.findall(r"CUDA_VISIBLE_DEVICES=\d (.*) &", page) == lines
