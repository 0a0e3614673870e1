"""Starting, waiting for and stopping a server that has workers of its own."""

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_frspec.serve import ServerCommand
from sgl_frspec.server_process import ServerError, ServerProcess

# Unhealthy at first, like a server that is still loading; its worker ignores polite requests.
SERVER = """
import http.server, pathlib, subprocess, sys
worker = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
worker += "signal.pause()"
child = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path(sys.argv[2]).write_text(str(child.pid))
print("loading weights", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 2 else 503)
        self.end_headers()
    def log_message(self, *ignored):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(code: str, *arguments: str) -> ServerCommand:
    return ServerCommand([sys.executable, "-c", code, *arguments], dict(os.environ), "cpu")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr("sgl_frspec.server_process._STOP_SECONDS", 1.0)
    port = free_port()
    run = command(SERVER, str(port), str(tmp_path / "worker"))
    with ServerProcess(run, f"http://127.0.0.1:{port}", tmp_path / "log") as server:
        yield server


def test_waits_for_health_then_stops_every_process(server, tmp_path):
    seen = []
    server.wait_until_ready(60, lambda seconds, line: seen.append((seconds, line)))
    worker = int((tmp_path / "worker").read_text())
    assert is_running(worker)
    assert seen
    assert seen[-1][1] == "loading weights"
    server.stop()
    assert not is_running(worker)
    assert not is_running(server._process.pid)
    server.stop()


def test_a_server_that_ends_shows_its_log(tmp_path):
    run = command("import sys; print('first', flush=True); sys.exit('no such model')")
    with (
        ServerProcess(run, "http://127.0.0.1:9", tmp_path / "log") as server,
        pytest.raises(ServerError, match=r"(?s)status 1 .*first\nno such model"),
    ):
        server.wait_until_ready(60)


def test_a_server_that_hangs_is_given_up(tmp_path):
    run = command("import signal; signal.pause()")
    with (
        ServerProcess(run, "http://127.0.0.1:9", tmp_path / "log") as server,
        pytest.raises(ServerError, match="not ready after 0 s"),
    ):
        server.wait_until_ready(0.1)
    assert not is_running(server._process.pid)


# Prints the server's process id, then hangs until it is killed.
CALLER = """
import os, pathlib, signal, sys
from sgl_frspec.serve import ServerCommand
from sgl_frspec.server_process import ServerProcess
argv = [sys.executable, "-c", "import signal; signal.pause()"]
run = ServerCommand(argv, dict(os.environ), "cpu")
server = ServerProcess(run, "http://127.0.0.1:9", pathlib.Path(sys.argv[1]))
print(server._process.pid, flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_killed_caller_takes_its_server_along(tmp_path):
    argv = [sys.executable, "-c", CALLER, str(tmp_path / "log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout
        server = int(caller.stdout.readline())
        watch = os.pidfd_open(server)
        assert is_running(server)
        caller.kill()
        ended, _, _ = select.select([watch], [], [], 30)
        os.close(watch)
    assert ended
