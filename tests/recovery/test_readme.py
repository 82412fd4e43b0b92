"""The examples of the README, run as they stand, one after the other."""

import re
import threading
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "recovery" / "README.md"


def test_the_examples_run_and_leave_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(threading.enumerate())
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 9
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README block {number}", "exec"), names)
    assert set(threading.enumerate()) <= before


def test_every_module_is_named() -> None:
    text = README.read_text()
    modules = {path.stem for path in README.parent.glob("*.py")} - {"__init__", "errors"}
    unnamed = {
        m for m in modules if f"`{m}`" not in text and not m.startswith(("storage", "checkpoint"))
    }
    assert unnamed == set()
