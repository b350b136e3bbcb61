"""Every lesson runs as it stands, draws its figure, and has the parts that a lesson has."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from minidist.verify.strategies import STRATEGIES
from tests.lessons.pages import LESSONS, ROOT

SECONDS = 100
QUICK = ("00",)  # -m slow and the site run all


def is_picture(path: Path) -> bool:
    """Return whether a file is a PNG of a figure, not an empty canvas."""
    return path.is_file() and path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000


def changes() -> str | None:
    """Return what git says has changed in the repository; None where there is no git or no
    checkout.
    """
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=all"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return answer.stdout if answer.returncode == 0 else None


def test_there_are_lessons():
    assert len(LESSONS) == 29


def run_lesson(lesson: Path | str, *arguments, path: Path = ROOT, seconds: float = SECONDS):
    """Run a script with arguments; `path` is looked into first for modules."""
    paths = [str(path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", lesson, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(
    "lesson",
    [
        pytest.param(lesson, marks=[] if lesson.number in QUICK else [pytest.mark.slow])
        for lesson in LESSONS
    ],
    ids=lambda lesson: lesson.path.stem,
)
def test_lesson_runs_as_it_stands_and_leaves_nothing_but_its_figure(lesson, tmp_path):
    before = changes()
    run = run_lesson(lesson.path, "--figures", tmp_path)
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    assert run.stdout.count("not solved yet") == 3
    assert changes() == before, "it wrote into the repository"
    if find_spec("matplotlib") is None:
        assert "no figure: the figures need matplotlib" in run.stdout
        pytest.skip("no matplotlib, which draws the figures: pip install 'minidist[lessons]'")
    assert is_picture(tmp_path / f"{lesson.path.stem}.png"), "it left no figure of its name"
    assert (tmp_path / f"{lesson.path.stem}.svg").read_text("utf-8").endswith("</svg>\n")


def test_help_and_wrong_arguments_are_answered_at_once(tmp_path):
    lesson = LESSONS[0].path
    help = run_lesson(lesson, "--help")
    assert help.returncode == 0 and "--figures DIR" in help.stdout and not help.stderr
    assert help.stdout.startswith("usage:"), "something was printed before"
    (tmp_path / "file").touch()
    for arguments, words in [
        (["--figure", "x"], "unrecognized arguments: --figure x"),
        (["--figures"], "--figures: expected one argument"),
        (["--figures", tmp_path / "file"], f"cannot write figures into {tmp_path / 'file'}"),
        (["--figures", tmp_path / "file" / "folder"], "cannot write figures into"),
        (["--exercise", "4"], "no exercise 4; choose one of 1, 2, 3"),
        (["--hint", "4"], "no exercise 00.4; lesson 00 has 1, 2, 3"),
        (["--hint", "1.4"], "exercise 00.1 has hints 1 to 3, not 4"),
        (["--hint", "1.x"], "--hint takes N or N.2, not 1.x"),
    ]:
        run = run_lesson(lesson, *arguments)
        assert (run.returncode, run.stdout) == (2, "")
        assert len(run.stderr.splitlines()) == 1 and words in run.stderr


@pytest.fixture
def figure_script(tmp_path):
    """A script that saves a figure, and a folder whose matplotlib cannot be imported."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(1, {str(ROOT / 'lessons')!r})\n"
        "from support import begin, figures\n"
        "begin()\n"
        "print(figures.show(lambda plt: plt.figure(), 'empty', caption='', alt=''))\n"
    )
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    return script


def test_without_matplotlib_one_line_stands_for_the_figure_and_the_lesson_goes_on(figure_script):
    run = run_lesson(figure_script, "--figures", figure_script.parent, path=figure_script.parent)
    assert run.returncode == 0, run.stderr
    line, returned = run.stdout.splitlines()
    assert line.startswith("no figure: the figures need matplotlib: pip install")
    assert returned == "None"


def test_in_a_notebook_the_arguments_are_the_kernels_own(figure_script, tmp_path):
    figure_script.write_text(
        "import builtins; builtins.get_ipython = 1\n" + figure_script.read_text()
    )
    run = run_lesson(figure_script, "-f", "kernel.json", "--help", path=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "no figure" in run.stdout


def test_a_missing_folder_is_made(figure_script, tmp_path):
    run = run_lesson(figure_script, "--figures", tmp_path / "new" / "folder", path=tmp_path)
    assert run.returncode == 0 and (tmp_path / "new" / "folder").is_dir()


def test_the_lesson_of_a_strategy_names_it():
    for name, record in STRATEGIES.items():
        text = (ROOT / "lessons" / f"{record.lesson}.py").read_text(encoding="utf-8")
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
    assert done.stdout.count("cosine to the right gradient 0.9") == 2
    assert changes() == before
