"""An event log as a file; the ending of its name chooses the format."""

from pathlib import Path

from minidist.events import EventLog
from minidist.tools import figures
from minidist.tools.chrome_trace import save_chrome_trace
from minidist.tools.timeline.figure import draw
from minidist.tools.timeline.lines import text

FIGURES = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
ENDINGS = [".txt", ".json", *FIGURES]


def check_path(path: str | Path) -> str:
    """Return the ending of a file that `save` can write; else raise ValueError."""
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise ValueError(f"a timeline is a file *{', *'.join(ENDINGS)}, not {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")
    if path.suffix in FIGURES:
        figures.pyplot()
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
        raise ValueError(f"cannot write {str(path)!r}: {error.strerror}") from error
