"""What every test gets: a fixed seed; without a GPU, Triton's interpreter and no GPU tests."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is imported, which any test module may do: before all of them.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20250214)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
