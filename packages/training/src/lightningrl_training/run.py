"""A run in Python: start it, go on with it, read it. The command line is a wrapper of this.

run = lightningrl.train("recipe.toml", settings={"loop.steps": 20})
run = await lightningrl.train_async(Recipe(agent=answer, …), run="runs/mine")
run = Run("runs/mine")  ─►  .metrics  .to_pandas()  .steps  .rollouts()  .trace(id)  .curve()
                            .recredit("rloo")  .xray()  .rescore(…)  .branch(id)  .export("weights")
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightningrl.console import accept_any_text
from lightningrl.errors import ConfigError, PluginError, RunFolderError
from lightningrl.loading import refuse_in_import
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl_client.recipe_file import with_settings
from lightningrl_runs.origin import RunOrigin
from lightningrl_training.checkpoints import checkpoints
from lightningrl_training.run_sync import Show, run_sync, show_nobody
from lightningrl_training.start import Source, StepWatcher, begin_run, read_source

if TYPE_CHECKING:
    import pandas

    from lightningrl.protocols import StepReport
    from lightningrl.records import RolloutFilter, RolloutRecord
    from lightningrl_credit.xray import XRay
    from lightningrl_runs.reader import StoredRun
    from lightningrl_runs.trace import Trace
    from lightningrl_training.doctor import Diagnosis
    from lightningrl_training.evaluation.certificate import Certificate
    from lightningrl_training.evaluation.examination import EvaluationReport
    from lightningrl_training.lab.branching import BranchedRollout
    from lightningrl_training.lab.recredit import Recredit, Rescore
    from lightningrl_training.loggers.curve import Curve

__all__ = ["Run", "doctor", "problems", "train", "train_async"]

T = TypeVar("T")


class Run:
    """A run's folder, while the run trains and afterwards: its start, its metrics, its weights. It takes no lock, and
    writes nothing there but the picture of the curve."""

    def __init__(self, folder: str | Path) -> None:
        """Raises RunFolderError where no run lies there."""
        self.folder = Path(folder)
        self._origin = RunOrigin.read(self.folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """In a notebook: where it lies, how far it is, its curve, and the line that opens its pages."""
        from lightningrl_training.loggers.curve import show_in_notebook

        return show_in_notebook(self.folder, f"step {self.steps} of {self.recipe.loop.steps}", self.metrics, self.curve)

    @property
    def recipe(self) -> Recipe:
        """The recipe that the run was started with, and the settings that it went on with since."""
        return self._origin.recipe

    @property
    def metrics(self) -> list[dict[str, float]]:
        """A row for each step with measurements, in order; step 0 is the untrained policy's validation."""
        from lightningrl_runs.metrics import read_metrics

        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.is_file() else []

    @property
    def steps(self) -> int:
        """Training steps that the newest checkpoint has; 0 where there is none."""
        saved = checkpoints(self.folder)
        return saved[-1].state.step if saved else 0

    def to_pandas(self) -> pandas.DataFrame:
        """`metrics` as a table, a row for each step, NaN where it has no value. Raises ConfigError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(
                f"a table of metrics needs pandas ({error}); pip install pandas, or read Run.metrics"
            ) from error
        if not self.metrics:
            return pandas.DataFrame()
        return pandas.DataFrame(self.metrics).astype({"step": int}).set_index("step")

    def curve(self) -> Curve:
        """The learning curve as a picture, drawn anew: its path, which a notebook shows as the picture. Raises
        RunFolderError where nothing was measured yet."""
        from lightningrl_training.loggers.curve import Curve, draw_curve

        path, source, title = self.folder / "curve.png", self.folder / "metrics.jsonl", self.recipe.name
        temperature = self.recipe.validation_sampling.temperature
        if not self.metrics or not draw_curve(source, path, title=title, validation_temperature=temperature):
            raise RunFolderError(f"run {str(self.folder)!r} has measured nothing yet, so there is no curve")
        return Curve(path)

    def rollouts(self, where: RolloutFilter | None = None) -> Sequence[RolloutRecord]:
        """Newest first, with task, outcome, reward and attempts; `where` is a `lightningrl.RolloutFilter`."""
        from lightningrl.records import RolloutFilter

        return self._look(lambda run: run.list_rollouts(where or RolloutFilter()))

    def trace(self, rollout_id: str) -> Trace:
        """A rollout as a person reads it: what was said in which tokens, and what each call earned. Raises
        LightningError naming rollouts near it where there is none."""
        return self._look(lambda run: run.trace(rollout_id))

    def show(self, rollout_id: str, *, full: bool = False) -> None:
        """Print a rollout as `lightningrl rollouts show` does; `full`: whole rows. Raises as `trace` does."""
        from rich.console import Console

        from lightningrl_runs.text import show_rollout

        accept_any_text()
        Console().print(self._look(lambda run: show_rollout(run, rollout_id, full=full)))

    def recredit(
        self, credit: Any = None, *, settings: Mapping[str, Any] | None = None, steps: Collection[int] | None = None
    ) -> list[Recredit]:
        """Credit the trained rollouts anew, beside the credit that they had; nothing is trained or written.

        credit     another assigner than the run's: a name, `"file.py:Class"`, a class or an object
        settings   by dotted key, as to `train`: `{"credit.options.gamma": 0.9, "rewards.brief.use": brief}`
        steps      only of these

        Rewards and evidence are the record's where made by the same, others are asked anew. Raises LightningError.
        """
        from lightningrl_training.lab.recredit import recredit

        chosen = {} if credit is None else {"credit.use": credit, "credit.options": {}}
        return run_sync(recredit(self.folder, with_settings(self.recipe, {**chosen, **(settings or {})}), steps))

    def xray(
        self,
        *,
        rollout: str | None = None,
        steps: Collection[int] | None = None,
        methods: Mapping[str, Any] | None = None,
        most: int | None = 20,
    ) -> XRay:
        """Credit of every installed method for the trained rollouts, beside the run's own.

        rollout    of its group alone, with this rollout
        steps      only of these
        methods    others by name: `{"mine": "file.py:Mine", "steep": {"use": "turns", "options": {"gamma": 0.5}}}`
        most       so many rollouts are in `XRay.rollouts`, those that methods disagree on most; None = all

        From the record: nobody is asked, nothing is trained or written. Raises LightningError.
        """
        from lightningrl_training.lab.xray import open_xray

        async def look() -> XRay:
            async with open_xray(self.folder, methods) as xray:
                return await (xray.of_run(steps, most=most) if rollout is None else xray.of_rollout(rollout))

        return run_sync(look())

    def rescore(
        self,
        reward: Any = None,
        *,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        steps: Collection[int] | None = None,
        write: bool = False,
    ) -> Rescore:
        """Show the effect of another reward on rewards, groups that teach, and credit; nothing is trained.

        reward     a name, `"file.py:new"` or a function, in place of the recipe's reward `name` (None = its only one)
        settings   by dotted key, as to `train`: `{"rewards.brief.weight": 0.2}`
        steps      only of these
        write      an imported run keeps the rewards

        Other rewards and evidence are the record's where what computed them is the same. Raises LightningError.
        """
        from lightningrl_training.lab.recredit import rescore

        return run_sync(rescore(self.folder, reward=reward, name=name, settings=settings, steps=steps, write=write))

    def branch(
        self,
        rollout_id: str,
        *,
        at: Sequence[int] | None = None,
        samples: int = 4,
        settings: Mapping[str, Any] | None = None,
        show: Show = show_nobody,
    ) -> BranchedRollout:
        """Measure the worth of a rollout's states: the agent runs anew, its first calls are answered as they were, and
        from there the newest weights are sampled, `samples` times. `at`: after so many calls; None = everywhere. The
        run's own store stays as it is. Raises LightningError."""
        from lightningrl_training.lab.branching import branch_rollout

        refuse_in_import("Run.branch")
        chosen = settings or {}
        return run_sync(branch_rollout(self.folder, rollout_id, at=at, samples=samples, settings=chosen, show=show))

    def evaluate(
        self, *, step: str | int | None = None, against: str | Run | None = None, **options: Any
    ) -> EvaluationReport:
        """`lightningrl.evaluate` of this run's weights; `step` as in `export`."""
        from lightningrl_training.evaluation.examination import evaluate

        other = str(against.folder) if isinstance(against, Run) else against
        return evaluate(f"{self.folder}{'' if step is None else f'@{step}'}", against=other, **options)

    def certify(self) -> Certificate:
        """Certify that each trained token was sampled, once, and is as probable to the trainer as to the engine. Raises
        LightningError."""
        from lightningrl_training.evaluation.certificate import certify

        return run_sync(certify(self.folder))

    def _look(self, question: Callable[[StoredRun], Coroutine[Any, Any, T]]) -> T:
        from lightningrl_runs.reader import ask_run

        return run_sync(ask_run(self.folder, question))

    def export(
        self,
        target: str | Path,
        *,
        policy: str | None = None,
        step: str | int | None = None,
        dtype: str | None = None,
        gguf: str | None = None,
        adapter: bool = False,
        push_to_hub: str | None = None,
        check: int = 0,
    ) -> int:
        """Write a trained policy's weights as an ordinary transformers folder (LoRA merged). Returns the step that they
        are of. It asks, samples and stops as the run did: by its template and its generation configuration.

        step         whose weights: `"best"` by validation, `"newest"`, or a step; None = the best, if any was validated
        dtype        `"float32"`, `"bfloat16"` or `"float16"`; None = the dtype of the folder that the run started from
        gguf         `"f16"`, `"q8_0"`, `"bf16"` or `"f32"`: `target` is a file for llama.cpp, in that precision
        adapter      what LoRA learned alone, a folder for `peft`
        push_to_hub  OWNER/NAME of the hub, where it is sent, too: to a private repository, made where there is none
        check        how many greedy calls of the step's validation are asked again, of transformers or llama.cpp

        Raises ConfigError where the run trains no such policy or it cannot take that form, RunFolderError where it has
        no such checkpoint or `target` is there already, BackendError where what was written answers otherwise.
        """
        from lightningrl_training.export import ExportForm, export_policy

        form = ExportForm(dtype=dtype, gguf=gguf, adapter=adapter, hub=push_to_hub)
        return export_policy(self.folder, self._origin, Path(target), form, policy=policy, step=step, check=check)


def train(
    recipe: Source | None = None,
    *,
    run: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
    on_step: Callable[[StepReport], object] | None = None,
) -> Run:
    """`train_async` for code that does not await. In a notebook, other tasks of its event loop wait for the end."""
    training = train_async(recipe, run=run, resume=resume, overwrite=overwrite, settings=settings, on_step=on_step)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(training)
    return run_sync(training)


async def train_async(
    recipe: Source | None = None,
    *,
    run: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
    on_step: Callable[[StepReport], object] | None = None,
) -> Run:
    """Train to the recipe's end; progress is shown where standard output goes.

    recipe     a Recipe, or its file or folder; with `resume` None is the one that the run was started with
    run        the run's folder; None is a new one below `runs`, with `resume` the newest
    resume     go on with the run that lies there: nothing is lost, nothing is trained twice
    overwrite  write over the run that lies there
    settings   settings by dotted key, before the recipe's: `{"loop.steps": 20}`
    on_step    called with each step's report

    Raises LightningError, one sentence. When the task is cancelled, the run can be resumed.
    """
    from rich.console import Console

    accept_any_text()
    with begin_run(recipe, run=run, resume=resume, overwrite=overwrite, settings=settings or {}) as opened:
        if on_step is not None:
            opened.plugins.register(StepWatcher(on_step), distribution="on_step")
        await opened.train(Console(), lambda address: None)
    return Run(opened.folder.path)


def problems(recipe: Source, *, settings: Mapping[str, Any] | None = None) -> Iterator[str]:
    """All that is wrong with a recipe, a sentence each; none = this machine can train it. Nothing is written; the agent
    is imported in a process of its own."""
    from lightningrl_training.checks import build_checked
    from lightningrl_training.warm_start import explain_warm_start

    refuse_in_import("lightningrl.problems")
    try:
        readable, wrong = read_source(recipe, settings or {})
        build_checked(readable, load_plugins(), wrong=[*wrong, *explain_warm_start(readable)])
    except (ConfigError, PluginError) as error:
        yield from error.args


async def doctor(
    recipe: Source,
    *,
    settings: Mapping[str, Any] | None = None,
    runs: str | Path = "runs",
    rehearse: float = 40.0,
    starting: Callable[[str], None] = lambda what: None,
) -> Diagnosis:
    """Run the recipe's agent a few times and take some learning steps on a copy of the weights: what is wrong, and what
    the whole run will take. What is wrong with the recipe is a finding, too; nothing is left behind. `rehearse`:
    seconds for the steps after the first, which show how rollouts change while the policy learns; 0 = none."""
    from lightningrl_training.doctor import examine

    whole, wrong = read_source(recipe, settings or {})
    return await examine(whole, wrong=wrong, runs=Path(runs), rehearse=rehearse, starting=starting)
