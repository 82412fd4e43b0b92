"""The command line of `autohet`, in a process that knows the exact model.

python -m tests.harness.train_exact train ARGUMENTS
"""

from autohet.cli.main import main
from tests.harness import toy_model  # noqa: F401

if __name__ == "__main__":
    raise SystemExit(main())
