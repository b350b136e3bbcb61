"""Pages that answer back: plain HTML, CSS and script, and the functions of minidist behind them.

answers.py       one question, one answer, both JSON: what every page asks
schedules.py     write a schedule, see it judged
calculator.py    a model and a mesh: bytes and seconds, and their equations
collectives.py   who sends which slice, step by step
mistakes.py      a mistake of the register: what moves, what sees it
waits.py         the deadlock of that page, in seeded interleavings
attention.py     a sequence over ranks, hop by hop
experts.py       tokens that travel to experts
build.py         the pages as part of the site, where Pyodide answers, or a table made beforehand
server.py        `minidist explore`: the same pages, answered by this package on this machine
written.py       a reader's Python, which the server runs in the labs' sandbox
real_run.py      a program on real ranks: certified, measured, simulated
frame.html       what is around each page: its head, and the way to the others
static/          one HTML file, and one script, per page; page.css and page.js are common to all

A page's module has `FIRST`, its first question, `answer(**question)`, and `as_text(answer)`, which
says in words what the page draws. Where an answer needs NumPy or ranks it also has `questions()`,
all that the page can ask: the site answers them when it is built.
"""
