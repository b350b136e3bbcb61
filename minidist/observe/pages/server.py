"""`minidist explore`: the pages, answered by this package on this machine, with real ranks.

    GET  /NAME.html?token=TOKEN     a page, with its first answer; its files need no token
    POST /answer {page, ...}        what answers.py answers; a reader's Python runs in a sandbox
    POST /run {text}                a program on real ranks, one at a time: {run}
    POST /status, /cancel {run}     what has come of it; end it

Other users of this machine, and other sites in the browser, reach this port, too. So it needs the
token of the address that is printed, its own Host, and an Origin of its own where there is one.
"""

import json
import re
import secrets
import socket
import socketserver
import sys
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

from minidist.errors import WrongInput, check_name
from minidist.observe.pages import answers, build, schedules
from minidist.observe.pages.real_run import RealRun
from minidist.observe.pages.written import Written
from minidist.pipeline_parallel.text import Unreadable

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = {path.name: path for path in build.STATIC.iterdir() if path.suffix[1:] in TYPES}
LARGEST = 256_000  # bytes of a question
SECONDS = 10  # in which a request has arrived
REFUSED = """<!doctype html>
<html lang="en"><title>minidist</title>
<p>This page is not shown: {}.</p></html>
"""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """The pages on a port of 127.0.0.1, 0 for any that is free. A context that leaves nothing."""

    def __init__(self, port: int = 0):
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise WrongInput(f"port {port}: {error.strerror}; leave --port out") from None
        self.token, self.page = secrets.token_urlsafe(24), cache(self._page)
        addresses = f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"
        self.hosts = {host.removesuffix(":80") for host in addresses}
        self.address = f"http://{addresses[0]}/?token={self.token}"
        self.written, self.runs = Written(), dict[str, RealRun]()  # the newest run alone
        self.signals: list[int] = []  # those that asked this process to end
        self._starting = threading.Lock()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks for the name of this machine
        self.server_port = self.server_address[1]

    def service_actions(self) -> None:
        """Leave `serve_forever`, which calls this between two requests, after a signal."""
        if self.signals:
            sys.exit(128 + self.signals[0])

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        for run in self.runs.values():
            run.stop()
        self.written.close()

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that has gone
            super().handle_error(request, client_address)

    def _page(self, name: str) -> bytes:
        """Return a file; a page with the token, and with its first answer."""
        page, _, kind = name.rpartition(".")
        if kind != "html":
            return FILES[name].read_bytes()
        token = f'<head>\n<meta name="minidist-token" content="{self.token}">'
        return build.page_of(page).replace("<head>", token, 1).encode()

    def answer(self, kind: str, question: dict) -> dict:
        """Return the answer to a POST. ValueError: why there is none."""
        check_name("question", kind, ("answer", "run", "status", "cancel"))
        if kind == "answer":
            return self._judged(question) if question.get("python") else answers.answer(question)
        if kind == "run":
            return self._started(str(question.get("text", "")))
        if (run := self.runs.get(str(question.get("run")))) is None:
            raise WrongInput("this run is not known any more; start it again")
        if kind == "cancel":
            run.stop()
        return run.status | {"defences": self._defences()}

    def _judged(self, question: dict) -> dict:
        """Answer a question with a reader's Python, which the sandbox runs."""
        p, m = (question.get(name, schedules.FIRST[name]) for name in "pm")
        try:
            made = self.written.text_of(str(question["python"]), p, m)
            answer = answers.answer(question | {"python": "# it has been run", "made": made or " "})
        except Unreadable as error:
            answer = schedules.unread("", error)
        return answer | {"defences": self._defences()}

    def _defences(self) -> str:
        """Return the sandbox's defences in words, if they are fewer than they should be."""
        defences = self.written.sandbox.defences
        return "" if defences.startswith("bubblewrap") else defences

    def _started(self, text: str) -> dict:
        with self._starting:
            if any(run.status["state"] == "running" for run in self.runs.values()):
                raise WrongInput("another run has not ended; wait for it, or cancel it")
            run = RealRun(text)
            self.runs = {str(run.process.pid): run}
        return {"run": str(run.process.pid)}


class Handler(BaseHTTPRequestHandler):
    """One request: refused, or answered."""

    server: Server
    timeout = SECONDS  # of each read, and of writing the answer

    def setup(self) -> None:
        super().setup()
        self._late = threading.Timer(SECONDS, self.connection.shutdown, [socket.SHUT_RD])
        self._late.daemon = True  # it ends the reading of a byte every second, too
        self._late.start()

    def finish(self) -> None:
        self._late.cancel()
        super().finish()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")  # urlsplit raises for http://[
        name = path[1:] or "index.html"
        token = parse_qs(query).get("token", [""])[0]
        if why := self._refusal(token if name.endswith(".html") else self.server.token):
            self._send(403, REFUSED.format(why).encode(), "text/html")  # people read it
        elif path == "/":
            self._send(302, {}, Location=f"/index.html?token={self.server.token}")
        elif name in FILES:
            self._send(200, self.server.page(name), TYPES[FILES[name].suffix[1:]])
        else:
            self._send(404, {"error": f"there is no {name}"})

    def do_POST(self) -> None:
        length, status = self.headers.get("Content-Length", ""), 200
        if why := self._refusal(self.headers.get("X-Token", "")):
            return self._send(403, {"error": why})
        if self.headers.get_content_type() != "application/json":
            return self._send(415, {"error": "a question is application/json"})
        if not re.fullmatch("[0-9]{1,6}", length) or int(length) > LARGEST:
            return self._send(413, {"error": f"a question has at most {LARGEST:,} bytes"})
        try:
            question = json.loads(self.rfile.read(int(length)))
            if not isinstance(question, dict):
                raise WrongInput("a question is an object with a page")
            answer = self.server.answer(self.path[1:], question)
        except RecursionError:
            answer, status = {"error": "a question is not as deep as this one"}, 400
        except Exception as error:  # the server goes on
            answer, status = {"error": str(error)}, 200 if isinstance(error, ValueError) else 500
        self._send(status, answer)

    def _refusal(self, token: str) -> str | None:
        """Return why this request is not answered; None if it is."""
        head, hosts = self.headers, self.server.hosts
        same_site = head.get("Host") in hosts and head.get("Sec-Fetch-Site") != "cross-site"
        if not same_site or head.get("Origin") not in {None, *(f"http://{host}" for host in hosts)}:
            return "this server answers its own pages alone, not another site or host"
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return "the token is wrong; use the address that `minidist explore` has printed"
        return None

    def _send(self, status: int, content: dict | bytes, kind="application/json", **more) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        described = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        self.send_response(status)
        for header in (HEADERS | described | more).items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *arguments) -> None:
        """Print nothing: a request has the token."""
