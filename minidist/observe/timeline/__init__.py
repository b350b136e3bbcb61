"""An event log as a picture: as text here, as a figure, or as a file.

log = EventLog()
minidist.run(worker, 2, log=log)                    # what happened
log = simulate(programs("1f1b", 4, 8)).timeline     # or what should happen: drawn the same way
print(timeline.text(log))
timeline.draw(log)
timeline.save(log, "1f1b.svg")
"""

from minidist.observe.timeline.figure import draw
from minidist.observe.timeline.lines import text
from minidist.observe.timeline.saving import check_path, save

__all__ = ["check_path", "draw", "save", "text"]
