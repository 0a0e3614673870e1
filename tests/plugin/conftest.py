"""A tiny model with a tokenizer, and what SGLang's own argument handling makes of command lines."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_frspec.cpu_engine.environment import cpu_environment
from sgl_frspec.maps import Vocabulary, read_vocabulary
from tests.engine.chain_model import Chain, make_chain_model
from tests.maps.conftest import write_tokenizer
from tests.plugin.resolve_arguments import MARK

ROOT = Path(__file__).parents[2]
Resolve = Callable[[list[str]], dict[str, Any]]


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    chain = make_chain_model(tmp_path_factory.mktemp("chain"))
    write_tokenizer(chain.target)
    return chain


@pytest.fixture(scope="session")
def vocabulary(chain: Chain) -> Vocabulary:
    return read_vocabulary(chain.target)


@pytest.fixture(scope="session")
def server_flags(chain: Chain) -> list[str]:
    """A command line that works, but for the map."""
    return (
        f"--model-path {chain.target} --speculative-algorithm FRSPEC"
        f" --speculative-draft-model-path {chain.draft} --device cpu --page-size 1"
        " --attention-backend frspec_cpu --sampling-backend pytorch --grammar-backend none"
    ).split()


@pytest.fixture(scope="session")
def resolve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resolve]:
    log = tmp_path_factory.mktemp("resolve") / "stderr"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.plugin.resolve_arguments"],
            env=cpu_environment(os.environ),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        requests, answers = process.stdin, process.stdout
        assert requests
        assert answers

        def run(argv: list[str]) -> dict[str, Any]:
            requests.write(json.dumps(argv) + "\n")
            requests.flush()
            for line in answers:
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK))
            pytest.fail(log.read_text()[-4000:])

        yield run
        requests.close()
