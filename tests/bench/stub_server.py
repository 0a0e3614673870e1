"""A process that starts like a server: ``python stub_server.py FLAGS``, the flags being SGLang's.

With ``--die`` among them it prints a traceback and ends.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def value(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"max_total_num_tokens": 4321} if self.path == "/server_info" else {}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


if "--die" in sys.argv:
    sys.exit("Traceback: CUDA out of memory on purpose")
ThreadingHTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
