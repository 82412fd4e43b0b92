"""Files outside the planner that run between an observation and the action that answers it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autohet.control.job_state import Training
from tests.driver.test_controller import make, run, trained

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(str(ROOT / package) for package in ("autohet", "recovery"))
MAX_FILES_OF_NOTICE = 18
MAX_FILES_OF_QUIET_TICK = 12
MAX_FILES_OF_CHANGE = 45
MAX_MODULES = 61
LIBRARIES = {"msgspec", "numpy", "typing_extensions"}
"""Libraries that come with what decides; msgspec brings the last one."""


def files_of(work: Callable[[], None]) -> set[str]:
    """Return the files of these packages in which `work` calls a function."""
    called = set()

    def note_call(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    sys.setprofile(note_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return {str(Path(name).relative_to(ROOT)) for name in called if name.startswith(PACKAGES)}


def tick_until(controller: Any, done: Callable[[], bool]) -> None:
    for _ in range(3000):
        controller.tick()
        if done():
            return
    raise AssertionError(f"the controller is still {controller.state}")


@pytest.mark.parametrize("deadline_s", [20.0, 600.0])
def test_a_notice_crosses_few_files_up_to_its_action(deadline_s: float) -> None:
    controller, workforce = make()
    run(controller, trained(controller, 6))

    def give_notice() -> None:
        workforce.warn("small-1", deadline_s)
        tick_until(controller, lambda: not isinstance(controller.state, Training))

    called = files_of(give_notice)
    assert {"autohet/control/decide.py", "autohet/control/states/training.py"} <= called
    assert len(called) <= MAX_FILES_OF_NOTICE, sorted(called)


def test_a_quiet_tick_crosses_few_files() -> None:
    controller, _ = make()
    run(controller, trained(controller, 6))
    called = files_of(controller.tick)
    assert "autohet/control/decide.py" in called
    assert len(called) <= MAX_FILES_OF_QUIET_TICK, sorted(called)


def test_a_change_of_the_fleet_crosses_few_files() -> None:
    controller, workforce = make()
    run(controller, trained(controller, 6))
    generation = controller.memory.generation

    def change() -> None:
        workforce.warn("small-1", 20.0)
        tick_until(
            controller,
            lambda: (
                controller.memory.generation > generation and isinstance(controller.state, Training)
            ),
        )

    assert len(called := files_of(change)) <= MAX_FILES_OF_CHANGE, sorted(called)


LOADED = """
import importlib, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*(set(sys.modules) - before))
"""


def loaded_by(*modules: str) -> tuple[set[str], set[str]]:
    """Return the modules of ours and the libraries that a fresh process loads with `modules`."""
    command = [sys.executable, "-c", LOADED, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    names = set(done.stdout.split())
    ours = {name for name in names if name.partition(".")[0] in ("autohet", "planner", "recovery")}
    tops = {name.partition(".")[0] for name in names - ours}
    libraries = {name for name in tops - sys.stdlib_module_names if "cython" not in name}
    return ours, libraries


def test_what_decides_loads_little() -> None:
    """Wrong: a decision that imports the runtime's models, and torch with them."""
    ours, libraries = loaded_by("autohet.control.decide")
    assert libraries <= LIBRARIES
    assert len(ours) <= MAX_MODULES, sorted(ours)


def test_control_loads_no_framework() -> None:
    paths = (ROOT / "autohet/control").rglob("*.py")
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    _, libraries = loaded_by(*[name.removesuffix(".__init__") for name in modules])
    assert libraries <= LIBRARIES | {"yaml"}
