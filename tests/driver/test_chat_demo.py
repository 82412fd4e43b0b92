"""What the demonstration of fine-tuning makes on a machine without a network."""

from pathlib import Path

import pytest
import torch

from autohet.cli.main import main
from autohet.emulate.chat_demo import chat_job, write_chat
from autohet.emulate.demo import reference_losses
from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config

ROOT = Path(__file__).parents[2]
JOB = ROOT / "cluster_configs" / "jobs" / "demo-chat.yaml"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    directory = tmp_path_factory.mktemp("demo")
    written = Job.from_yaml(JOB)
    write_chat(directory, written.training.seed)
    return chat_job(written, directory)


def test_its_data_are_conversations_with_targets_and_held_out_ones(job: Job) -> None:
    length = job.training.sequence_length
    trained = prepare_dataset(job.require_training(), length).facts
    assert job.evaluation_data is not None
    held_out = prepare_dataset(job.evaluation_data, length).facts
    assert trained.num_documents > 5 * held_out.num_documents > 100
    assert 0 < (trained.num_targets or 0) < trained.num_rows * length
    assert trained.isolated
    assert trained.max_token < load_config(job.model, job.training).vocab_size


def test_its_reference_learns_with_the_rows_of_the_run(job: Job) -> None:
    threads = torch.get_num_threads()
    losses = reference_losses(job, 2)
    torch.set_num_threads(threads)
    assert losses[1] < losses[0] < 6.5  # log 512 is 6.24


def test_a_demonstration_of_adapters_without_chat_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "job.yaml"
    wrong.write_text(JOB.read_text().replace("kind: chat", "kind: text"))
    assert main(["demo", "--job", str(wrong)]) == 2
    assert "needs data.kind: chat" in capsys.readouterr().err
