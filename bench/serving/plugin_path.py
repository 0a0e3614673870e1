"""Let SGLang find the plugin of a checkout that is not installed.

SGLang finds plugins by the entry points of installed distributions. A folder that holds no more
than a distribution's metadata, on ``PYTHONPATH`` beside the checkout, serves as one: machines
without a package registry need no build tools this way.
"""

import sys
from pathlib import Path

from sgl_frspec import __version__

_METADATA = f"Metadata-Version: 2.1\nName: sgl-frspec\nVersion: {__version__}\n"
_ENTRY_POINTS = "[sglang.srt.plugins]\nfrspec = sgl_frspec.plugin:register\n"


def write_plugin_metadata(folder: Path) -> Path:
    """Write the plugin's metadata into ``folder``, which then belongs on ``PYTHONPATH``."""
    metadata = folder / f"sgl_frspec-{__version__}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(_METADATA, encoding="utf-8")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
    return folder


if __name__ == "__main__":
    write_plugin_metadata(Path(sys.argv[1]))
