"""A recipe: everything that a run is made of, in one small YAML file.

`load_recipe` reads a recipe that ships, a file or a run folder, applies dotted overrides (`learner.clip=0.2`), and
checks all that can be checked without loading a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator

from srpo_env.errors import InvalidRecipe, UnknownName, nearest
from srpo_env.records import Sampling
from srpo_env.registry import load, registered
from srpo_env.yaml_source import read_yaml, write_yaml

_FORMS = ("str", "tuple[str, ...]", "one", "named")
"""Parts of a pydantic error's location that stand for an alternative, not for a key."""


class Section(BaseModel):
    """Base of a recipe's sections: unknown keys are refused, values don't change once read."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")


class WorkflowUse(Section):
    """Which workflow, with which params."""

    use: str
    """A name that ships, or a path."""
    params: dict[str, Any] = {}
    """Values for its params."""
    policies: dict[str, str] = {}
    """Policies of single agents, in place of those that the workflow names."""


class TasksUse(Section):
    """Which tasks. Further keys are settings of the task set, such as `high: 99` of arithmetic."""

    use: str | tuple[str, ...]
    """Names, paths, or a list of them."""
    split: str = "train"
    """Split of the set."""
    limit: int | None = Field(None, ge=1)
    """Keeps the first tasks of each set."""
    columns: dict[str, str] = {}
    """For a file: its names for id, problem and answer."""
    reward: str | None = None
    """Replaces the set's reward: `module:attr` or `./file.py:attr`."""
    extra_member_cost: float = Field(0.0, ge=0)
    """What each member of a set beyond its first takes off the score."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)


def _form(value: Any) -> str:
    return "one" if isinstance(value, TasksUse) or not isinstance(value, Mapping) or "use" in value else "named"


TasksUses = Annotated[
    Annotated[TasksUse, Tag("one")] | Annotated[dict[str, TasksUse], Tag("named")], Discriminator(_form)
]
"""Tasks, or several sets of them by name, each with settings of its own."""


class Tasks(Section):
    """The tasks to train on and those held out."""

    train: TasksUse
    """What is trained on."""
    eval: TasksUses | None = None
    """What is held out; left out: what is trained on. Sets with settings of their own have names, as in
    {two: {use: arithmetic, terms: 2}, three: {use: arithmetic, terms: 3}}."""


class ToolUse(Section):
    """What an agent's tool is. Further keys are the tool's own settings."""

    use: str | None = None
    """Name of a tool, `module:attr` or `./file.py:attr`; left out: the tool of the name that agents call."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)


class SampleUse(Section):
    """How a policy is sampled. Further keys are the backend's own settings."""

    backend: str = "local"
    """Name of a backend, or `module:attr`."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)


class Lora(Section):
    """An adapter that is trained in place of the weights, which stay as they are."""

    rank: int = Field(32, ge=1)
    """Inner size of the adapter's two matrices."""
    alpha: float = Field(64.0, gt=0)
    """The adapter's output counts alpha / rank times."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the modules that get one, such as q_proj; left out: all linear ones but the output layer."""


class PolicyTraining(Section):
    """How a policy's weights are changed."""

    lora: Lora | None = None
    """Trains an adapter on the model; policies of one model share its weights. Left out: trains all weights."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate of AdamW, after warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls to `final_lr` over the run's updates."""
    final_lr: float = Field(0.0, ge=0)
    """Rate at the last update, as a share of `lr`."""
    warmup_updates: int = Field(0, ge=0)
    """Updates over which the rate rises from zero."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon of AdamW."""
    grad_clip: float | None = Field(1.0, gt=0)
    """Largest norm of this policy's gradient; none: not clipped."""
    autocast: Literal["bfloat16"] | None = None
    """Computes the forward pass in this type; weights and optimiser stay in the policy's own."""


class PolicyUse(Section):
    """A set of weights, how it is sampled, and how it is trained; without `train` it is frozen."""

    model: str | None = None
    """A transformers folder, a registered name such as tiny_arithmetic, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights."""
    device: str = "auto"
    """`cpu`, `cuda`, or whichever there is."""
    sample: SampleUse = SampleUse()
    """How it is sampled."""
    train: PolicyTraining | None = None
    """How it is trained."""


class SamplingUse(Section):
    """Sampling settings: for training, for evaluation, and by agent on top of both."""

    train: Sampling = Sampling()
    """While training."""
    eval: Sampling | None = None
    """While evaluating; left out: as in training."""
    agents: dict[str, dict[str, Any]] = {}
    """Settings of single agents, on top of both."""


class RolloutUse(Section):
    """How much is sampled for an update."""

    tasks_per_batch: int = Field(16, ge=1)
    """Tasks of an update."""
    group_size: int = Field(8, ge=1)
    """G: episodes of each task."""
    max_in_flight: int = Field(512, ge=1)
    """Most episodes that run at once."""
    deterministic: bool = True
    """In-process sampling waits until no episode can go on without it."""


class EvalUse(Section):
    """When and how the held-out tasks are tried."""

    every_updates: int | None = Field(None, ge=1)
    """Evaluates in between, too; always before the first update and after the last."""
    samples: int = Field(1, ge=1)
    """Episodes of each task."""
    by: str | None = None
    """A key of the tasks' meta, such as `difficulty`: figures are also given for each of its values."""
    baseline: str | None = None
    """A workflow evaluated beside the team's with the same policies, such as single_agent: what one output is worth."""


class LogUse(Section):
    """What is kept."""

    checkpoint_every_updates: int | None = Field(None, ge=1)
    """Checkpoints in between; always after the last update."""
    keep: int = Field(3, ge=1)
    """Last checkpoints kept, beside the best by the held-out figure."""


class Recipe(Section):
    """Everything that a run is made of."""

    srpo_env: Literal[1] = 1
    """Version of the grammar."""
    description: str = ""
    """One or two sentences for lists."""
    workflow: WorkflowUse
    """The team; in short, its name or path."""
    tasks: Tasks
    """What is solved."""
    tools: dict[str, ToolUse] = {}
    """Tools by the name that agents call; one that is left out is the registered tool of that name."""
    policies: dict[str, PolicyUse] = Field(min_length=1)
    """Weights by label; agents without one use `main`."""
    sampling: SamplingUse = SamplingUse()
    """How outputs are sampled."""
    rollout: RolloutUse = RolloutUse()
    """How much is sampled."""
    trainer: str = "srpo"
    """Who learns from the events."""
    learner: dict[str, Any] = {}
    """Settings of the trainer."""
    eval: EvalUse = EvalUse()
    """When the held-out tasks are tried."""
    log: LogUse = LogUse()
    """What is kept."""
    seed: int = Field(0, ge=0)
    """Decides everything that is drawn."""
    updates: int = Field(100, ge=0)
    """Batches to sample and learn from."""
    threads: int | None = Field(None, ge=1)
    """Threads of torch on the CPU; left out: torch's own choice."""
    run: str | None = None
    """Run folder; left out: runs/<recipe>-<time>."""

    @field_validator("workflow", mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    def sampling_of(self, agent: str, *, evaluating: bool = False) -> Sampling:
        """Returns an agent's settings."""
        base = (self.sampling.eval or self.sampling.train) if evaluating else self.sampling.train
        return Sampling(**{**base.model_dump(), **self.sampling.agents.get(agent, {})})

    def to_yaml(self) -> str:
        """Returns the recipe as it would be written, defaults included."""
        return write_yaml(self.model_dump(mode="json", by_alias=True))


def recipe_folders() -> list[Path]:
    """Folders of recipes that installed packages bring."""
    return [Path(load("recipe", name)()) for name in sorted(registered("recipe"))]


def recipe_names() -> dict[str, Path]:
    """Recipes that ship, by name."""
    return {path.stem: path for folder in recipe_folders() for path in sorted(folder.glob("*.yaml"))}


def find_recipe(target: str | Path) -> Path:
    """Returns the file of a recipe that ships, of a path, or of a run folder.

    Raises:
        UnknownName: No such recipe; the nearest names are given.
    """
    path = Path(target)
    if path.is_dir() and (path / "config.yaml").is_file():
        return path / "config.yaml"
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    known = recipe_names()
    if str(target) in known:
        return known[str(target)]
    raise UnknownName(
        f"recipe {str(target)!r} is not known; those that ship are {', '.join(known)}.{nearest(str(target), known)} "
        "Give one of them, the path of a .yaml file, or a run folder."
    )


def load_recipe(target: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Recipe:
    """Reads a recipe and applies overrides.

    Args:
        target: A recipe that ships, a file, or a run folder.
        overrides: `key=value` texts with dotted keys, or a mapping; each must address a key that a recipe has.
            `learner.preset` first drops the keys that the file sets beside its own preset, such as the clip.

    Raises:
        UnknownName: No such recipe.
        InvalidRecipe: The file or an override breaks a rule.
    """
    path = find_recipe(target)
    try:
        data, _, problems = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRecipe(f"recipe {path} can't be read: {' '.join(str(error).split())}") from error
    if problems:
        raise InvalidRecipe("\n".join(map(str, problems)))
    if not isinstance(data, dict):
        raise InvalidRecipe(
            f"recipe {path} holds a {type(data).__name__}; a recipe is a mapping with workflow, tasks and policies."
        )
    return recipe_of(data, overrides, str(path))


def recipe_of(data: dict[str, Any], overrides: Iterable[str] | Mapping[str, Any], where: str) -> Recipe:
    """Applies overrides to a recipe's data and checks it.

    Args:
        data: The recipe as plain data; it is changed.
        overrides: See `load_recipe`.
        where: What messages call it.
    """
    pairs = read_overrides(overrides)
    if any(key == "learner.preset" for key, _ in pairs):
        _drop_preset_keys(data, dict(pairs))
    for key, value in pairs:
        _set(data, key, value)
    return check_recipe(data, where)


def _drop_preset_keys(data: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Drops what the file sets beside its preset: another preset brings its own."""
    trainer = overrides.get("trainer", data.get("trainer", Recipe.model_fields["trainer"].default))
    learner = data.get("learner")
    if isinstance(learner, dict) and isinstance(trainer, str):
        for key in getattr(load("trainer", trainer), "preset_keys", ()):
            learner.pop(key, None)


def is_workflow(target: str | Path) -> bool:
    """Whether a target is a workflow and not a recipe: a name of one, or a file with nodes."""
    from srpo_env.loading import workflow_files

    path = Path(target)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return "\nnodes:" in path.read_text(encoding="utf-8", errors="replace")
    return str(target) not in recipe_names() and str(target) in workflow_files()


def check_recipe(data: Mapping[str, Any], where: str) -> Recipe:
    """Checks a recipe's form, sampling for training included.

    Raises:
        InvalidRecipe: All that breaks a rule, one line each.
    """
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise InvalidRecipe("\n".join(_problem(where, each) for each in error.errors())) from error
    for agent, settings in recipe.sampling.agents.items():
        try:
            Sampling(**{**recipe.sampling.train.model_dump(), **settings})
        except ValidationError as error:
            raise InvalidRecipe(
                "\n".join(_problem(f"{where}: sampling.agents.{agent}", each, Sampling) for each in error.errors())
            ) from error
    return recipe


def read_overrides(overrides: Iterable[str] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns overrides as keys with values, which are read as YAML.

    Raises:
        InvalidRecipe: One has not the form key=value, or its value can't be read.
    """
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    pairs = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidRecipe(f"override {text!r}: it has the form key=value, such as learner.clip=0.2 or seed=1.")
        read, _, problems = read_yaml(value or "null", f"override {text!r}")
        if problems:
            raise InvalidRecipe("\n".join(map(str, problems)))
        pairs.append((key.strip(), read))
    return pairs


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    known = data.get("policies") or {}
    if parents[:1] == ["policies"] and last != "model" and len(parents) > 1 and parents[1] not in known:
        raise InvalidRecipe(
            f"override {key}={value}: {parents[1]!r} is not a policy of the recipe; it has {', '.join(known)}."
            f"{nearest(parents[1], known)} A new one begins with its model: policies.{parents[1]}.model=..."
        )
    at = data
    for position, parent in enumerate(parents):
        below = at.setdefault(parent, {})
        if isinstance(below, str) and parent == "workflow":
            below = at[parent] = {"use": below}
        if not isinstance(below, dict):
            raise InvalidRecipe(
                f"override {key}={value}: {'.'.join(parents[: position + 1])!r} is {below!r} and has no keys."
            )
        at = below
    if value != at.get(last):
        _drop_settings_of_another(at, key)
    at[last] = value


def _drop_settings_of_another(section: dict[str, Any], key: str) -> None:
    """Drops the settings that belong to the task set, tool, backend or workflow that another one takes the place of."""
    used = ToolUse if key.startswith("tools.") else TasksUse
    for ending, own in ((".use", used), (".backend", SampleUse)):
        if key.endswith(ending):
            for each in set(section) - set(own.model_fields):
                del section[each]


def _problem(where: str, error: Any, model: type[BaseModel] = Recipe) -> str:
    place = ".".join(str(part) for part in error["loc"] if part not in _FORMS)
    if error["type"] == "extra_forbidden":
        known = _keys_at(error["loc"][:-1], model)
        return (
            f"{where}: unknown key {place!r}; known here are {', '.join(known)}.{nearest(str(error['loc'][-1]), known)}"
        )
    if error["type"] == "missing":
        return f"{where}: key {place!r} is missing; it has no default. Add it."
    return f"{where}: {place}: {error['msg']}, and it is {error['input']!r}."


def _keys_at(location: tuple[Any, ...], model: Any) -> list[str]:
    for part in location:
        field = getattr(model, "model_fields", {}).get(part)
        if field is not None:
            model = field.annotation
        candidates = [model, *getattr(model, "__args__", ())]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    return list(getattr(model, "model_fields", {}))
