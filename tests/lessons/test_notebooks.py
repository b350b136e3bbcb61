"""Every lesson runs in a notebook's kernel beside `support/`, and leaves nothing but its figure."""

import shutil

import pytest

from tests.lessons.test_lessons import ROOT, SECONDS, changes, each_lesson, is_picture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]
FOLDERS = """IPYTHONDIR JUPYTER_CONFIG_DIR JUPYTER_DATA_DIR JUPYTER_RUNTIME_DIR
MPLCONFIGDIR""".split()


@each_lesson
def test_lesson_runs_in_a_notebook_and_leaves_nothing_but_its_figure(lesson, tmp_path, monkeypatch):
    install = "notebooks need: pip install 'minidist[lessons]'"
    jupytext = pytest.importorskip("jupytext", reason=install)
    nbclient = pytest.importorskip("nbclient", reason=install)
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir(), temporary.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lessons" / "support", here / "support", ignore=ignored)
    monkeypatch.setenv("TMPDIR", str(temporary))
    for name in FOLDERS:
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel has its own
    before, notebook = changes(), jupytext.read(lesson)
    nbclient.execute(notebook, here, timeout=SECONDS, kernel_name="python3")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "not solved yet" in "".join(output.get("text", "") for output in outputs)
    (figure,) = [path for path in temporary.rglob("*") if path.is_file()]
    assert figure.name == f"{lesson.stem}.png" and is_picture(figure)
    assert list(here.iterdir()) == [here / "support"] and changes() == before
