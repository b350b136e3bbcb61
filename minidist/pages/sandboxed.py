"""A reader's Python, run in the labs' sandbox, which `Written` keeps warm; never in the server."""

import re
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from minidist.pages.written import FILE, text_of
from minidist.pipeline_parallel.text import Unreadable

PLACE = re.compile(rf"; shortly before.*?{FILE}, line (\d{{1,6}}).*", re.S)


def attempt(source: str, p: int, m: int) -> dict[str, str]:
    """Return, inside the sandbox, a program's text form, or a fault and its line."""
    try:
        return {"text": text_of(source, p, m)}
    except Unreadable as error:
        return {"fault": str(error), "line": str(error.line or "")}


class Written:
    """A sandbox that runs one program at a time; of the programs that wait, the newest alone."""

    def __init__(self, seconds: float = 5.0):
        from minidist.course.sandbox import Sandbox  # which is not in the sandbox
        from minidist.course.sandbox.limits import Limits

        limits = Limits(seconds, memory=512 << 20, processes=8)
        self.sandbox = Sandbox(None, limits, files=(FILE,)).__enter__()
        self._thread = ThreadPoolExecutor(1)  # bubblewrap ends with the thread that starts it
        self._newest: Future = self._thread.submit(self.sandbox.call, [])  # it gets warm

    def text_of(self, source: str, p: int, m: int) -> str:
        """Return what `written.text_of` returns there. Unreadable: why there is nothing."""
        self._newest.cancel()  # one that runs goes on
        given = {"source": source, "p": p, "m": m}
        mine = self._thread.submit(self.sandbox.call, [(__name__, "attempt", given)])
        self._newest = mine
        try:
            (found,) = mine.result().answers
        except CancelledError:
            raise Unreadable("a newer program came before this one was run") from None
        if isinstance(found, str):  # the program was ended
            line = at[1] if (at := PLACE.search(found)) else ""
            found = {"fault": PLACE.sub("; does a loop not end?", found), "line": line}
        if "text" not in found:
            line = str(found.get("line", ""))[:6]
            raise Unreadable(str(found.get("fault")), int(line) if line.isdecimal() else None)
        return str(found["text"])

    def close(self) -> None:
        """End the program that runs, and remove the sandbox."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.sandbox.stop()
        self._thread.shutdown()
        self.sandbox.__exit__()
