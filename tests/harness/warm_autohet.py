"""`autohet` as a program whose Ray nodes fork their workers from the tests' server.

python -m tests.harness.warm_autohet train --job job.yaml
"""

import sys

from autohet.cli.main import main
from tests.harness.warm_ray import launching_raylets

if __name__ == "__main__":
    with launching_raylets():
        code = main()
    sys.exit(code)
