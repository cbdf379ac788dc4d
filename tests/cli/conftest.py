"""What the tests of the command line share."""

import pytest
from command_line import model_arrays, write


@pytest.fixture(autouse=True)
def plain_output(monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "CUQUANT_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "model.safetensors", model_arrays(), {"made by": "a test"})
