#!/usr/bin/env bash
# Software: accelerate 1.15.0, torch 2.13.0, boto3 1.44.5
# Expected: `import accelerate`, which transformers does for every model, takes the library. The
#   questions of `accelerate config` about SageMaker, and AWS's client, are of that command alone.
# Seen: it imports the command's questionnaire with its terminal menus, and boto3 with it wherever
#   boto3 is installed. A program that keeps boto3 out of its workers, or watches sys.modules for
#   it, has it by loading a model.
# Output:
#   questions about SageMaker: True
#   terminal menus: True
#   boto3: True
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile accelerate==1.15.0 boto3==1.44.5

cat >"$work/finding.py" <<'PY'
import sys

import accelerate

assert accelerate.__version__ == "1.15.0"
for what, module in (
    ("questions about SageMaker", "accelerate.commands.config.sagemaker"),
    ("terminal menus", "accelerate.commands.menu"),
    ("boto3", "boto3"),
):
    print(f"{what}:", module in sys.modules)
    assert module in sys.modules
PY
"$work/venv/bin/python" "$work/finding.py"
