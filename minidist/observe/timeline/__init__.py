"""An event log as a picture: as text, as a figure, or as a file.

log = EventLog()
minidist.run(worker, 2, log=log)                    # what happened
log = simulate(programs("1f1b", 4, 8)).timeline     # or what should happen: drawn the same way
print(timeline.text(log))
timeline.draw(log)
timeline.save(log, "1f1b.svg")
"""

from collections.abc import Iterable
from pathlib import Path

from minidist.errors import WrongInput, check_writable
from minidist.events import EventLog
from minidist.observe import style
from minidist.observe.chrome_trace import save_chrome_trace
from minidist.observe.timeline.figure import draw
from minidist.observe.timeline.lines import text

FIGURES = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
ENDINGS = [".txt", ".json", *FIGURES]

__all__ = ["FIGURES", "check_path", "draw", "save", "text"]


def check_path(path: str | Path, what: str = "a timeline", endings: Iterable[str] = ENDINGS) -> str:
    """Return the ending of a file that can be written; else raise ValueError."""
    path = Path(path)
    if path.suffix not in endings:
        raise WrongInput(f"{what} is a file *{', *'.join(endings)}, not {str(path)!r}")
    check_writable(path, repr(str(path)))
    if path.suffix in FIGURES:
        style.pyplot()
    return path.suffix


def save(log: EventLog, path: str | Path, title: str | None = None, width: int = 100) -> None:
    """Write the picture in the format of the ending: .txt, .json (Perfetto), .png, .pdf, .svg."""
    ending = check_path(path)
    try:
        if ending == ".txt":
            Path(path).write_text(text(log, width) + "\n", encoding="utf-8")
        elif ending == ".json":
            save_chrome_trace(log, path)
        else:
            draw(log, title).savefig(path, metadata=FIGURES[ending])
    except OSError as error:
        raise WrongInput(f"cannot write {str(path)!r}: {error.strerror}") from error
