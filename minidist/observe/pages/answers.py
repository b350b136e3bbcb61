"""One question, one answer, both JSON: all that a page knows of Python.

    {"page": "schedules", "schedule": "1f1b", "p": 4, "m": 8}    -> {"makespan": ..., "rows": ...}
    {"page": "schedules", "schedule": "1f1b", "p": 0, "m": 8}    -> {"error": "a pipeline has ..."}

In the site Pyodide runs `answer_json` in the reader's browser, or `build.py` has recorded it; with
`minidist explore` the server calls it.
"""

import json
from importlib import import_module
from types import ModuleType

from minidist.errors import WrongInput, check_name

PAGES = ("schedules", "calculator", "collectives", "mistakes", "attention", "experts")


def page(name: str) -> ModuleType:
    """Return the module of a page; each is imported when it is first asked."""
    check_name("page", name, PAGES)
    return import_module(f"minidist.observe.pages.{name}")


def answer(question: dict) -> dict:
    """Return a page's answer; {"error": a sentence} to what no page can answer."""
    try:
        if not isinstance(question, dict):
            raise WrongInput(f"a question is an object with a page, not {question!r}")
        arguments = dict(question)
        return page(arguments.pop("page", "")).answer(**arguments)
    except (ValueError, TypeError) as error:  # TypeError: an argument that there is not
        return {"error": str(error)}


def answer_json(question: str) -> str:
    return json.dumps(answer(json.loads(question)))


def recorded(name: str) -> dict[str, dict]:
    """Return {question as text: answer} for every question of a page that has `questions()`.

    A page that answers several at a time also has `record()`: pairs of questions and answers.
    """
    if hasattr(page(name), "record"):
        return {as_key(each): answered for each, answered in page(name).record()}
    return {as_key(each): answer({"page": name, **each}) for each in page(name).questions()}


def as_key(question: dict) -> str:
    """Return a question as page.js writes it: sorted, without the page and without spaces."""
    return json.dumps(question, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
