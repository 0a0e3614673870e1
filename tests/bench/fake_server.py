"""Something that answers like an SGLang server, so that clients can be tested without one."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[str, Any], Any]


@contextmanager
def fake_server(reply: Reply) -> Iterator[str]:
    """The URL of a server that answers ``reply(path, body)`` as JSON.

    An exception becomes status 400 with its text; a list of strings under ``stream`` in the body is
    sent as server-sent events.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(None)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(json.loads(body))

        def _answer(self, body):
            try:
                status, answer = 200, reply(self.path, body)
            except Exception as error:
                status, answer = 400, str(error)
            self.send_response(status)
            self.end_headers()
            if status == 200 and isinstance(body, dict) and body.get("stream"):
                for event in answer:
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")
            else:
                self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
