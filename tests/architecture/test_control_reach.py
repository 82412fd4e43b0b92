"""Files of `driver/control` that run between an observation and the action that answers it."""

import sys
from pathlib import Path

import pytest

from autohet.control.values.states import Training
from autohet.driver.loop import controller as controller_module
from tests.driver.test_controller import make, run, trained

CONTROL = Path(controller_module.__file__).parent
MAX_FILES = 6
MAX_MODULES = 20


def control_files_of(work):
    """Return the files of `control/` in which `work` calls a function."""
    called = set()

    def note_call(frame, event, _):
        if event == "call":
            called.add(frame.f_code.co_filename)

    sys.setprofile(note_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return {Path(name).name for name in called if Path(name).parent == CONTROL}


def leave_training(controller):
    for _ in range(3000):
        controller.tick()
        if not isinstance(controller.state, Training):
            return
    raise AssertionError("the controller still trains")


@pytest.mark.parametrize("deadline_s", [20.0, 600.0])
def test_a_notice_crosses_few_files_up_to_its_action(deadline_s):
    controller, workforce = make()
    run(controller, trained(controller, 6))

    def give_notice():
        workforce.warn("small-1", deadline_s)
        leave_training(controller)

    called = control_files_of(give_notice)
    assert {"decide.py", "training.py"} <= called
    assert len(called) <= MAX_FILES, called


def test_a_quiet_tick_crosses_few_files():
    controller, _ = make()
    run(controller, trained(controller, 6))
    called = control_files_of(controller.tick)
    assert "decide.py" in called
    assert len(called) <= MAX_FILES, called


def test_the_state_machine_has_few_modules():
    assert len(list(CONTROL.glob("*.py"))) <= MAX_MODULES
