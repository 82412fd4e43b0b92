"""What a node's agent imports: every node waits for it, and its memory stays for the whole run."""

import subprocess
import sys


def test_an_agent_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, autohet.driver.ray.agents.agent_actor\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[]\n"
