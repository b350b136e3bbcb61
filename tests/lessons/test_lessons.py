"""Every lesson runs as it stands, draws its figure, and leaves nothing else."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from minidist.verify.strategies import STRATEGIES
from tests.lessons.pages import FOLDER, LESSONS, ROOT

SECONDS = 100


def changes() -> str | None:
    """Return what git says has changed in the repository; None where there is no git or no
    checkout.
    """
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=all"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return answer.stdout if answer.returncode == 0 else None


def run_lesson(lesson: Path | str, *arguments, path: Path = ROOT):
    """Run a script with arguments; `path` is looked into first for modules."""
    paths = [str(path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", lesson, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.path.stem)
def test_lesson_runs_as_it_stands_and_leaves_nothing_but_its_figure(lesson, tmp_path):
    before = changes()
    run = run_lesson(lesson.path, "--figures", tmp_path)
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    assert run.stdout.count("not solved yet") == 3
    assert changes() == before, "it wrote into the repository"
    if find_spec("matplotlib") is None:
        assert "no figure: the figures need matplotlib" in run.stdout
        pytest.skip("no matplotlib, which draws the figures: pip install 'minidist[lessons]'")
    picture = (tmp_path / f"{lesson.path.stem}.png").read_bytes()
    assert picture[:4] == b"\x89PNG" and len(picture) > 10_000, "an empty canvas"
    assert (tmp_path / f"{lesson.path.stem}.svg").read_text("utf-8").endswith("</svg>\n")


def test_help_and_wrong_arguments_are_answered_before_anything_is_printed(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "file").touch()
    for arguments, status, words in [
        (["--help"], 0, "--figures DIR"),
        (["--figure", "x"], 2, "unrecognized arguments: --figure x"),
        (["--figures"], 2, "--figures: expected one argument"),
        (["--figures", str(tmp_path / "file" / "folder")], 2, "cannot write figures into"),
        (["--exercise", "4"], 2, "no exercise 4; choose one of 1, 2, 3"),
        (["--hint", "4"], 2, "no exercise 00.4; lesson 00 has 1, 2, 3"),
        (["--hint", "1.4"], 2, "exercise 00.1 has hints 1 to 3, not 4"),
        (["--hint", "1.x"], 2, "--hint takes N or N.2, not 1.x"),
    ]:
        monkeypatch.syspath_prepend(FOLDER)
        monkeypatch.setattr(sys, "argv", ["lesson", *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(LESSONS[0].path), run_name="__main__")
        printed = capsys.readouterr()
        assert end.value.code == status and words in printed.out + printed.err
        if status:
            assert printed.out == "" and len(printed.err.splitlines()) == 1


def test_without_matplotlib_one_line_stands_for_the_figure_and_in_a_notebook_no_argument_counts(
    tmp_path,
):
    script = tmp_path / "script.py"
    script.write_text(
        "import builtins; builtins.get_ipython = 1\n"
        f"import sys; sys.path.insert(1, {str(FOLDER)!r})\n"
        "from support import begin, figures\n"
        "begin()\n"
        "print(figures.show(lambda plt: plt.figure(), 'empty', caption='', alt=''))\n"
    )
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    run = run_lesson(script, "-f", "kernel.json", "--help", path=tmp_path)
    assert run.returncode == 0, run.stderr
    line, returned = run.stdout.splitlines()
    assert line.startswith("no figure: the figures need matplotlib: pip install")
    assert returned == "None"


def test_the_lesson_of_a_strategy_names_it():
    for name, record in STRATEGIES.items():
        text = (FOLDER / f"{record.lesson}.py").read_text(encoding="utf-8")
        assert re.search(rf"\b{name}\b", text), f"{record.lesson} does not name {name}"


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_the_page_for_a_module_of_pytorchs_finds_its_three_mistakes():
    """It asserts what it says: all right, then a mean of means, a lost all_reduce, another gelu."""
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed: pip install torch")
    before = changes()
    done = run_lesson("lessons/check_your_own.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("cosine to the right gradient 0.9") == 3
    assert changes() == before
