"""A user's files: whatever a run starts, refuses, writes over or takes back, what it did not make keeps bytes, names
and modes."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import sized

from lightningrl.errors import ConfigError, RunFolderError, StoreError
from lightningrl.scaffold import new_agent, new_package
from lightningrl_client.recipe_file import load_recipe
from lightningrl_runs.origin import newest_run
from lightningrl_runs.summary import is_live
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import make_spec
from lightningrl_training.checkpoints import LoopState
from lightningrl_training.loggers import JsonlLogger
from lightningrl_training.run_folder import RunFolder

RECIPE = 'agent = "agent.py:answer"\ntasks.train = "data.py:train"\npolicy.model = "starter"\nrewards.exact.use = "reward.py:exact"\n'
OURS = [
    *(
        "checkpoints",
        "branches",
        "evaluations",
        "logs",
        "tensorboard",
        "wandb",
        "step-000001",
        "policies",
        "policy",
        "1",
        "g000000-000",
    ),
    *(
        "run.json",
        "recipe.json",
        "metrics.jsonl",
        "curve.png",
        "store.sqlite",
        "store.sqlite-wal",
        "view.key",
        "loop.json",
        ".lock",
    ),
    *(".checkpoints.new", ".step-000001", ".run.json.new", "server.log", "worker-0.log", "files.json"),
]
"""Names that a run gives, in whatever place."""
names = st.one_of(
    st.sampled_from(OURS), st.text("ab.-é \n", min_size=1, max_size=6).filter(lambda name: name.strip("."))
)
contents = st.one_of(
    st.binary(max_size=9),
    st.sampled_from(
        [b"{}", b"[]", b"12345", b'{"step": 3, "reward": 1}\n', b'{"models": {}, "settings": {}}', b'["a"]']
    ),
)
modes = st.sampled_from([0o644, 0o600, 0o755, 0o444])
Tree = Mapping[tuple[str, ...], tuple[bytes, int] | int]
"""By path: a file's content and rights, or a folder's rights."""
trees: st.SearchStrategy[Tree] = st.dictionaries(
    st.lists(names, min_size=1, max_size=4).map(tuple),
    st.one_of(st.tuples(contents, modes), st.sampled_from([0o755, 0o700, 0o711])),
    max_size=6,
)


def plant(tree: Tree, folder: Path) -> dict[Path, object]:
    """Put files and folders where nothing lies; what was put."""
    planted: dict[Path, object] = {}
    for names, planned in tree.items():
        path = folder.joinpath(*names)
        with contextlib.suppress(FileExistsError, NotADirectoryError, PermissionError):
            above = [parent for parent in path.parents if not parent.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            planted |= dict.fromkeys(above)
            if isinstance(planned, int):
                path.mkdir()
                path.chmod(planned)
            else:
                with path.open("xb") as file:
                    file.write(planned[0])
                path.chmod(planned[1])
            planted[path] = None
    return look(planted)


def look(paths: Mapping[Path, object]) -> dict[Path, object]:
    """Each one's kind, rights and content."""
    return {path: (path.lstat().st_mode, None if path.is_dir() else path.read_bytes()) for path in paths}


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path


def create(recipe_file: Path, path: Path, *, overwrite: bool = False) -> RunFolder:
    return RunFolder.create(
        path, load_recipe(recipe_file), str(recipe_file), {}, models={"policy": "starter"}, overwrite=overwrite
    )


def save(folder: RunFolder, step: int) -> None:
    scratch = folder.new_checkpoint(step)
    (scratch / "policies" / "policy").mkdir(parents=True)
    (scratch / "policies" / "policy" / "weights").write_bytes(b"ours")
    folder.commit_checkpoint(scratch, LoopState(step=step, seconds=0.0, rollouts=0), keep=1)


def work(folder: RunFolder) -> None:
    """Make what a run makes."""
    for step in (0, 2):
        save(folder, step)
    for name in ("server.log", "worker-1.log"):
        (folder.logs / name).write_bytes(b"ours")
    logger = JsonlLogger(folder.metrics, resume_after=-1)
    logger.log(0, {"reward": 0.5})
    logger.close()
    folder.write_view_key("ours")
    with folder.making("wandb"):
        (folder.path / "wandb" / "run-1").mkdir(parents=True)
        (folder.path / "wandb" / "run-1" / "config.yaml").write_bytes(b"ours")
    for place in ("branches/step-000002/g0", "evaluations/now/policy"):
        (folder.path / place).mkdir(parents=True)
        (folder.path / place / "run.json").write_text('{"models": {}}')
        (folder.path / place / "store.sqlite").touch()
    (folder.path / "evaluations" / "now.json").write_text('{"evaluations": [], "comparison": null}')


@settings(max_examples=sized(25, 1000), deadline=None)
@given(tree=trees, overwrite=st.booleans())
def test_whatever_lies_in_a_folder_that_is_no_run_stays_as_it_is(
    recipe_file: Path, tree: Tree, overwrite: bool
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch) / "d"
        where.mkdir(mode=0o755)
        planted = plant(tree, where)
        if planted:
            with pytest.raises(RunFolderError, match="a run is made in a new or an empty folder: give another --run"):
                create(recipe_file, where, overwrite=overwrite)
            with pytest.raises(RunFolderError):
                RunFolder.resume(where, {})
            assert {*where.rglob("*")} == planted.keys(), "and nothing was put beside it"
        else:
            folder = create(recipe_file, where, overwrite=overwrite)
            folder.discard()
            folder.close()
            assert not any(where.iterdir())
        assert look(planted) == planted
        assert stat.S_IMODE(where.stat().st_mode) == 0o755


@settings(max_examples=sized(25, 1000), deadline=None)
@given(tree=trees, ends=st.sampled_from(["overwrite", "discard", "train on", "never began"]), data=st.data())
def test_whatever_is_put_into_a_runs_folder_stays_as_it_is_when_the_run_goes(
    recipe_file: Path, tree: Tree, ends: str, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch) / "d"
        folder = create(recipe_file, where)
        if ends != "never began":
            work(folder)
        made = {path for path in where.rglob("*") if not path.is_dir()}
        planted = {path: was for path, was in plant(tree, where).items() if not is_as_ours(path, where)}
        if ends == "discard":
            folder.discard()
        elif ends == "train on":
            with contextlib.suppress(RunFolderError):  # something lies where a checkpoint goes
                save(folder, 1)
                save(folder, 3)
        folder.close()
        if ends in ("overwrite", "never began"):
            with contextlib.suppress(RunFolderError):  # something lies where the run needs a file
                create(recipe_file, where, overwrite=ends == "overwrite").close()
        assert look(planted) == planted
        if ends == "discard":
            assert not {path for path in made if path.exists()} - {where / ".lock", where / "run.json"}


def is_as_ours(path: Path, run: Path) -> bool:
    """A name of ours in its place, or a folder with nothing else in it: nobody could tell who made it."""
    parts = path.relative_to(run).parts
    if path.is_dir():
        return all(is_as_ours(below, run) for below in path.iterdir()) and (parts[-1] in OURS or len(parts) > 1)
    if parts[0] == "checkpoints":  # in step-000001 of nobody's all is somebody's, a file of such a name too
        return len(parts) > 2 and parts[1] == ".step-000001"
    return parts[-1] in OURS and (
        len(parts) == 1 or parts[0] == "logs" or (parts[0] in ("branches", "evaluations") and len(parts) > 3)
    )


def test_a_start_that_fails_takes_back_what_it_made_and_nothing_else(recipe_file: Path, tmp_path: Path) -> None:
    user = tmp_path / "d"
    for name in (
        "checkpoints/my-model/weights.bin",
        "logs/mine.txt",
        "wandb/run-1/config.yaml",
        "metrics.jsonl",
        "recipe.json",
    ):
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).write_text('{"step": 1}\n')
    with pytest.raises(
        RunFolderError, match=r"holds 'checkpoints' and no run; a run is made in a new or an empty folder"
    ):
        create(recipe_file, user, overwrite=True)
    assert len(list(user.rglob("*"))) == 10
    fresh = create(recipe_file, tmp_path / "fresh")
    fresh.discard()
    fresh.close()
    assert not (tmp_path / "fresh").exists()


def test_a_users_copies_of_checkpoints_and_links_to_others_stay_as_they_are(recipe_file: Path, tmp_path: Path) -> None:
    other = create(recipe_file, tmp_path / "other")
    save(other, 7)
    for ends in ("train on", "overwrite"):
        folder = create(recipe_file, tmp_path / ends)
        save(folder, 2)
        kept = folder.path / "checkpoints"
        for name in ("step-000002-keep", "step-best", ".step-notes"):
            shutil.copytree(kept / "step-000002", kept / name)
        (kept / "step-000001").symlink_to(tmp_path / "other" / "checkpoints" / "step-000007")
        assert [saved.folder.parent.name for saved in folder.checkpoints()] == ["step-000001", "step-000002"]
        if ends == "train on":
            save(folder, 3)
        folder.close()
        if ends == "overwrite":
            create(recipe_file, folder.path, overwrite=True).close()
        for name in ("step-000002-keep", "step-best", ".step-notes"):
            assert (kept / name / "policies" / "policy" / "weights").read_bytes() == b"ours"
        assert not (kept / "step-000001").is_symlink(), "the run that comes is not to go on from it"
        assert len(other.checkpoints()) == 1
        assert (other.checkpoints()[0].folder / "policy" / "weights").read_bytes() == b"ours"
    other.close()


def test_a_file_is_no_run_folder(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "d").write_text("mine")
    with pytest.raises(RunFolderError, match="cannot be read: Not a directory; give another --run"):
        create(recipe_file, tmp_path / "d")
    assert (tmp_path / "d").read_text() == "mine"


async def test_a_run_with_rollouts_and_no_checkpoint_is_not_wiped_by_the_same_command(
    recipe_file: Path, tmp_path: Path
) -> None:
    folder = create(recipe_file, tmp_path / "run")
    store = await SqlStore.open(folder.store_url)
    await store.create_rollouts([make_spec("a")])
    await store.close()
    folder.close()
    with pytest.raises(
        RunFolderError, match="already holds a run; go on with it by --resume, write over it with --overwrite"
    ):
        create(recipe_file, tmp_path / "run")
    assert folder.has_rollouts()
    create(recipe_file, tmp_path / "run", overwrite=True).close()
    assert not folder.has_rollouts()


def test_a_run_whose_store_cannot_be_read_is_not_wiped_by_the_same_command(recipe_file: Path, tmp_path: Path) -> None:
    create(recipe_file, tmp_path / "run").close()
    (tmp_path / "run" / "store.sqlite").write_bytes(b"SQLite format 3\0 and then nothing that anybody reads" * 99)
    with pytest.raises(RunFolderError, match="already holds a run"):
        create(recipe_file, tmp_path / "run")


@pytest.mark.parametrize("name", [".lock", ".run.json.new", ".recipe.json.new"])
def test_a_link_where_a_run_puts_a_file_is_not_followed(recipe_file: Path, tmp_path: Path, name: str) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    create(recipe_file, tmp_path / "run").close()
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(mine)
    if name == ".lock":
        with pytest.raises(
            RunFolderError,
            match=r"its '.lock' cannot be opened \(Too many levels of symbolic links\); remove it, or give",
        ):
            create(recipe_file, tmp_path / "run")
    else:
        create(recipe_file, tmp_path / "run").close()
    assert mine.read_text() == "mine"
    assert not is_live(tmp_path / "run")


@pytest.mark.parametrize("line", [b'{"loss": 3}', b"[1]", b"loss=3", b'{"step": "x"}', b"[" * 9999])
def test_metrics_of_another_program_are_refused_by_their_line_and_stay(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(RunFolderError, match=r"line 2 of '.*metrics.jsonl' is no metrics entry"):
        JsonlLogger(path, resume_after=-1)
    assert path.read_bytes().endswith(line + b"\n")


def test_metrics_that_are_cut_keep_their_rights(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    path.chmod(0o640)
    JsonlLogger(path, resume_after=1).close()
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b'{"step": 1}\n', 0o640)


def test_another_programs_run_json_is_not_the_newest_run(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "run.json").write_text(json.dumps({"models": ["gpt"], "settings": {}}))
    with pytest.raises(RunFolderError, match="no run below"):
        newest_run(tmp_path)


@pytest.mark.parametrize("make", [new_agent, lambda folder: new_package("reward", "brevity", folder)])
@settings(max_examples=10, deadline=None)
@given(tree=trees)
def test_templates_leave_a_folder_that_is_in_use(make: object, tree: Tree) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        planted = plant(tree, Path(scratch))
        if planted and callable(make):
            with pytest.raises(ConfigError, match="is in use; name another one"):
                make(Path(scratch))
        assert look(planted) == planted


@pytest.mark.parametrize("make", [new_agent, lambda folder: new_package("reward", "mine", folder)])
def test_templates_say_of_a_folder_that_cannot_be_written_why(make: Callable[[Path], Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for where, why in (("file/x", "Not a directory"), ("link", "File exists")):
        with pytest.raises(ConfigError, match=f"cannot be written: {why}; name another one"):
            make(tmp_path / where)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "link"]


async def test_a_database_of_another_program_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "mine.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE mine (x)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="is a database of something else, no LightningRL store; choose another path"):
        await SqlStore.open(f"sqlite:///{path}")
    assert (path.read_bytes(), [file.name for file in tmp_path.iterdir()]) == (before, ["mine.db"])
