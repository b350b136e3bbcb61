"""The server of `minidist explore`: whom it answers, and what a reader's Python cannot do."""

import json
import os
import socket
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection

import pytest

from minidist.course.sandbox.inside.values import encode
from minidist.observe.pages import answers, schedules, server
from minidist.observe.pages.written import Written
from tests.comm.test_cluster import gone
from tests.course.tiny import WHY_NOT, choose
from tests.test_killed import below

GPIPE = """
def program(rank, p, m):
    yield from (f"F{i}" for i in range(m))
    yield from (f"B{i}" for i in range(m))
"""
ENDLESS = "\n\nwhile True: pass\n"


@contextmanager
def serving(seconds=1.0, wrapped=True):
    """Give a server whose sandbox ends a program after some seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "Written", partial(Written, seconds))
        choose(patch, wrapped)
        with server.Server() as running:
            threading.Thread(target=running.serve_forever, daemon=True).start()
            yield running
            running.shutdown()


@pytest.fixture(scope="module")
def explore():
    with serving() as running:
        yield running


def ask(running, method, path, body=None, **headers):
    """Return status, headers and text of an answer; a header that is None is not sent."""
    usual = {"Host": f"127.0.0.1:{running.server_port}"}
    if method == "POST":
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        usual |= {"Content-Type": "application/json", "X-Token": running.token}
        usual |= {"Content-Length": str(len(body))}
    given = usual | {name.replace("_", "-"): value for name, value in headers.items()}
    connection = HTTPConnection("127.0.0.1", running.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    for name, value in given.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    found = response.status, response.headers, response.read().decode()
    connection.close()
    return found


def as_json(answer):
    """Return an answer as it arrives: with lists in place of tuples."""
    return json.loads(json.dumps(answer))


def get(running, path, **headers):
    return ask(running, "GET", path, **headers)


def post(running, kind, **question):
    status, _, text = ask(running, "POST", f"/{kind}", question)
    assert status == 200, text
    return json.loads(text)


def written(running, python, **question):
    return post(running, "answer", page="schedules", python=python, **question)


def test_the_printed_address_leads_to_a_page_with_the_token_its_first_answer_and_its_files(explore):
    path = explore.address.removeprefix(f"http://127.0.0.1:{explore.server_port}")
    status, headers, _ = get(explore, path)
    assert (status, headers["Location"]) == (302, f"/index.html?token={explore.token}")
    assert get(explore, headers["Location"])[0] == 200
    status, _, text = get(explore, f"/schedules.html?token={explore.token}")
    assert status == 200
    assert f'<meta name="minidist-token" content="{explore.token}">' in text
    data = text.split('id="first">')[1].split("</script>")[0]
    question = {"page": "schedules", **schedules.FIRST}
    assert json.loads(data)["answer"] == as_json(answers.answer(question))
    status, headers, text = get(explore, "/page.js")
    assert status == 200 and headers.get_content_type() == "text/javascript"
    assert text == (server.build.STATIC / "page.js").read_text("utf-8")


def test_a_post_answers_what_the_package_answers(explore):
    question = {"page": "schedules", "schedule": "zb_h1", "p": 3, "m": 5}
    assert post(explore, "answer", **question) == as_json(answers.answer(question))
    assert "did you mean" in post(explore, "answer", page="schedule")["error"]


def test_nothing_is_answered_without_the_token(explore):
    for token in ("", "?token=", "?token=wrong", "?token=%C3%A9", "?other=1"):
        for path in ("/", "/schedules.html", "/nothing.html"):
            status, headers, text = get(explore, path + token)
            assert status == 403 and explore.token not in text and "the token is wrong" in text
            assert headers.get_content_type() == "text/html", "a person reads it"
    for kind in ("answer", "run", "status", "cancel"):
        path = f"/{kind}?token={explore.token}"  # in the address it does not count
        for header in (None, "", "wrong", "é"):
            assert ask(explore, "POST", path, {}, X_Token=header)[0] == 403


STRANGERS = [
    {"Host": "evil.example"},  # a name that its owner has made that of 127.0.0.1
    {"Host": "127.0.0.1"},
    {"Host": "127.0.0.1:1"},
    {"Host": None},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "https://127.0.0.1:PORT"},
    {"Sec_Fetch_Site": "cross-site"},
]


def test_another_host_or_origin_is_refused_even_with_the_token(explore):
    port = str(explore.server_port)
    for given in STRANGERS:
        headers = {name: value and value.replace("PORT", port) for name, value in given.items()}
        for path in (f"/schedules.html?token={explore.token}", "/page.js"):
            assert get(explore, path, **headers)[0] == 403, headers
        assert ask(explore, "POST", "/answer", {"page": "schedules"}, **headers)[0] == 403
    for name in ("127.0.0.1", "localhost"):
        own = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
        own["Sec_Fetch_Site"] = "same-origin"
        assert ask(explore, "POST", "/answer", {"page": "schedules"}, **own)[0] == 200


def test_what_is_no_question_is_refused_and_the_server_goes_on(explore):
    for kind in (None, "text/plain", "application/x-www-form-urlencoded"):  # as a form sends it
        assert ask(explore, "POST", "/answer", {}, Content_Type=kind)[0] == 415
    for length in ("256001", "9" * 5000, "-1", "x", "²", None):
        status, _, text = ask(explore, "POST", "/answer", b"", Content_Length=length)
        assert status == 413 and "256,000 bytes" in text
    for body in (b"", b"{", b"\xff", b"[" * 100_000, b"[" * 99_999 + b"]" * 99_999, b"7", b"[]"):
        status, _, text = ask(explore, "POST", "/answer", body)
        assert status in (200, 400) and json.loads(text)["error"]
    for method in "HEAD PUT DELETE OPTIONS TRACE CONNECT".split():
        assert ask(explore, method, "/")[0] == 501
    for run in (None, [], {}, 7, "x"):
        for kind in ("status", "cancel"):
            assert "not known any more" in post(explore, kind, run=run)["error"]
    assert post(explore, "answer", page="schedules")["fault"] is None


def test_nothing_but_the_files_of_the_pages_is_given(explore):
    for path in """/../server.py /static/../server.py /%2e%2e/server.py //etc/passwd /page.js/
        /..%2fserver.py /page.js%00 /answers.py /. /static file:///etc/passwd http://[""".split():
        assert get(explore, path)[0] == 404, path


def test_every_answer_forbids_other_sites_to_use_it(explore):
    question = ask(explore, "POST", "/answer", {"page": "schedules"})
    page = get(explore, f"/schedules.html?token={explore.token}")
    for status, headers, _ in (question, page, get(explore, "/page.js"), get(explore, "/")):
        assert headers["Content-Security-Policy"].startswith("default-src 'self'"), status
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"


def test_it_listens_on_loopback_alone(explore):
    assert explore.socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", explore.server_port), timeout=5)


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off(explore, monkeypatch):
    monkeypatch.setattr(server, "SECONDS", 0.3)
    deadline = time.monotonic() + 20
    with socket.create_connection(("127.0.0.1", explore.server_port), timeout=0.05) as client:
        client.sendall(b"GET /page.js HT")
        while time.monotonic() < deadline:
            assert get(explore, "/page.js")[0] == 200  # others are answered meanwhile
            try:
                client.sendall(b"x")
                if client.recv(1000) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the client still holds a thread")


def test_a_client_that_goes_leaves_no_traceback(explore, capfd):
    with socket.create_connection(("127.0.0.1", explore.server_port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
        client.sendall(b"GET /page.js HTTP/1.1\r\n")
    assert get(explore, "/page.js")[0] == 200
    assert capfd.readouterr().err == ""


def test_an_answer_says_which_defences_are_lacking():
    with serving(wrapped=False) as running:
        assert "no bubblewrap (it is not wanted), so" in written(running, GPIPE)["defences"]


HOSTILE = {
    ENDLESS: (3, "no answer: stopped after 1 s; does a loop not end?"),
    "x = bytearray(1 << 30)": (1, "MemoryError"),
    "import socket\nsocket.create_connection(('127.0.0.1', PORT))": (2, "Error: "),
    "open('/etc/minidist', 'w')": (1, "Read-only file system|Permission denied"),
    "with open('x', 'wb', 0) as f:\n    while f.write(bytes(80 << 20)):\n        pass": (
        {None, 2, 3},  # the watch over the folder, the kernel, or the clock: whichever comes first
        "more than 64 MB|File too large|stopped after 1 s",
    ),
    "import os\nwhile True:\n    os.fork()": (
        {None, 1, 2, 3},
        "BlockingIOError: |not what the sandbox",
    ),
    "import os\nos._exit(0)": (None, "the process ended with exit code 0"),
    "import os\nos.kill(os.getpid(), 9)": (None, "ended by the signal SIGKILL"),
    "": (1, "there is no program"),
}


@pytest.mark.skipif(WHY_NOT is not None, reason=f"needs bubblewrap: {WHY_NOT}")
def test_a_hostile_program_is_ended_and_named(explore):
    for source, (line, words) in HOSTILE.items():
        answer = written(explore, (source or "#").replace("PORT", str(explore.server_port)))
        fault = answer["fault"]
        assert fault["line"] in (line if isinstance(line, set) else {line}), fault
        assert any(word in fault["message"] for word in words.split("|")), fault
        assert answer["drawing"] is None and answer["certificate"] is None
    right = written(explore, GPIPE)
    assert right["fault"] is None and right["defences"] == ""


def test_what_a_reader_writes_never_runs_in_the_server(explore):
    ids = "import os\nraise ValueError(f'{os.getpid()} of {os.getppid()}, {os.getuid()}')"
    message = written(explore, ids)["fault"]["message"]
    inside, above = message.partition("ValueError: ")[2].split(",")[0].split(" of ")
    assert str(os.getpid()) not in (inside, above)


FORGED = """
import json, os, sys
def program(rank, p, m):
    assert "pytest" not in sys.modules, "in the server"
    with open("0", "wb") as file:
        file.write(ANSWER)
    os._exit(0)
"""


def forged(value):
    """Return a program that writes the sandbox's answer itself: this value."""
    return FORGED.replace("ANSWER", repr(encode({"answer": value})))


FORGERIES = [  # what an answer of a reader's says, and what it is answered
    ({"text": "\n"}, "the text is empty"),
    ({"text": "/etc/passwd"}, "line 1"),
    ([1], "the answer is not what the sandbox writes"),
    ({"other": "x"}, "None"),
    ({"fault": "x", "line": "²"}, "x"),
    ({"fault": "x", "line": "9" * 5000}, "x"),
    ({"fault": "<script>", "line": "7"}, "<script>"),
]


def test_an_answer_that_a_reader_forges_is_a_fault_at_most(explore):
    for fields, words in FORGERIES:
        fault = written(explore, forged(fields))["fault"]
        assert words in fault["message"] and fault["line"] in (None, 1, 7, 999999), fault


def test_a_text_is_never_the_name_of_a_file(explore):
    for kind in ("answer", "run"):
        found = post(explore, kind, **{"text": __file__} | {"page": "schedules"})
        assert "pytest" not in json.dumps(found) and (found.get("error") or found["fault"])


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_that_is_closed_leaves_nothing_even_while_a_program_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    others = below(os.getpid()).keys()
    with serving(seconds=60) as running:
        written(running, GPIPE)
        ready = below(os.getpid()).keys()
        hostile = {"page": "schedules", "python": ENDLESS}
        thread = threading.Thread(target=lambda: ask(running, "POST", "/answer", hostile))
        thread.start()
        until(lambda: below(os.getpid()).keys() - ready)  # the program's
        started = below(os.getpid()).keys() - others
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    assert gone(started)
    thread.join()
    assert list(tmp_path.glob("minidist-*")) == []
