"""The planner loads fast: no framework, and the heavy readers only when a file needs them."""

import subprocess
import sys


def test_importing_the_planner_loads_no_framework():
    code = (
        "import planner, planner.cost.model, planner.cost.layers.calibration, planner.cost.trace,"
        " sys;print([m for m in ('torch', 'ray', 'boto3', 'transformers', 'pyarrow', 'scipy',"
        " 'pandas') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"


def test_a_whole_plan_with_its_bound_loads_no_solver_and_no_metadata():
    code = (
        "import autohet.cli.main, autohet.cli.plan, sys; from planner.answers.robustness import"
        " robustness;from planner.strategies import plan_with; from tests.planner.cases import"
        " fleet, model, request;asked = request(fleet(('A100', 1, 2), ('T4', 1, 2)), 64,"
        " model(4));answer = plan_with('autohet', asked); robustness(asked.cost, answer.plan,"
        " answer.candidates);assert 'bound' in answer.search.proof, answer.search.proof;print([m"
        " for m in ('scipy', 'importlib.metadata', 'pyarrow', 'torch', 'ray') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"
