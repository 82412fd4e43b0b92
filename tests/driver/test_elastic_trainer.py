"""Ray Train's configuration becomes the job's, what has no meaning is refused by name, and what a
run leaves becomes Ray Train's result.
"""

import subprocess
import sys

import pytest
from ray.train import CheckpointConfig, FailureConfig, RunConfig, TrainingFailedError, UserCallback
from ray.train.constants import DEFAULT_STORAGE_PATH
from torch.distributed.checkpoint import FileSystemReader

import autohet
from autohet.driver.job import elastic_trainer
from autohet.driver.job.elastic_trainer import ANY_NUMBER, History
from autohet.driver.job.job_run import Outcome
from autohet.runtime.job import Job
from planner.errors import ConfigError
from recovery.storage.open import open_storage
from tests.harness.checkpoint_cases import make_checkpoint

JOB = {
    "name": "toy",
    "model": {"config": {"model_type": "gpt2"}},
    "training": {"global_batch_sequences": 8, "sequence_length": 8, "steps": 4},
    "data": {"source": "builtin:python-stdlib"},
}


def configured(job=None, **options):
    return autohet.ElasticTrainer(job or JOB, run_config=RunConfig(**options)).job


def test_importing_the_package_imports_neither_ray_nor_torch():
    code = (
        "import sys, autohet; print([name for name in ('ray', 'torch', 'pandas') if name in"
        " sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = autohet.Trainer


def test_without_a_run_config_the_job_is_as_it_was(tmp_path):
    assert autohet.ElasticTrainer(JOB).job == Job.from_document(JOB)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {config: {model_type: gpt2}}\ntraining: {global_batch_sequences: 8,"
        " sequence_length: 8}\n"
    )
    assert autohet.ElasticTrainer(path).job.name == "mine"
    with pytest.raises(ConfigError, match="stepz"):
        autohet.ElasticTrainer({**JOB, "training": {"stepz": 3}})


def test_where_checkpoints_go():
    stored = {**JOB, "checkpoint": {"storage": "s3://mine/toy"}}
    assert configured(name="run", storage_path="s3://b/p/").checkpoint_storage == "s3://b/p/run"
    assert configured(name="run", storage_path="s3://b/p").name == "run"
    assert (
        configured(stored, name="run", storage_path="s3://b/p").checkpoint_storage == "s3://b/p/run"
    )
    assert configured(stored).checkpoint_storage == "s3://mine/toy"  # no storage_path was given
    assert (
        configured().checkpoint_storage == f"{DEFAULT_STORAGE_PATH}/toy"
    )  # nor a name: Ray's changes with each run
    unnamed = configured({key: value for key, value in JOB.items() if key != "name"})
    assert unnamed.name.startswith("ray_train_run-")


def test_how_many_checkpoints_and_failures():
    assert configured(checkpoint_config=CheckpointConfig(num_to_keep=7)).checkpoint.keep == 7
    assert configured().checkpoint.num_kept is None, (
        "num_to_keep=None is all, as Ray Train means it"
    )
    assert configured({**JOB, "checkpoint": {"keep": 5}}).checkpoint.num_kept == 5
    assert configured({**JOB, "checkpoint": {"keep": 3}}).checkpoint.num_kept == 3
    assert autohet.ElasticTrainer(JOB).job.checkpoint.num_kept == 3
    assert (
        autohet.ElasticTrainer({**JOB, "checkpoint": {"keep": "all"}}).job.checkpoint.num_kept
        is None
    )
    assert (
        configured(failure_config=FailureConfig(max_failures=2)).elastic.max_failures_in_a_row == 2
    )
    assert (
        configured(failure_config=FailureConfig(max_failures=-1)).elastic.max_failures_in_a_row
        == ANY_NUMBER
    )
    assert configured().elastic.max_failures_in_a_row == 5


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"callbacks": [UserCallback()]}, "run_config.callbacks"),
        ({"worker_runtime_env": {"pip": ["x"]}}, "run_config.worker_runtime_env"),
        (
            {"failure_config": FailureConfig(max_preemption_failures=0)},
            "failure_config.max_preemption_failures is 0",
        ),
        (
            {"failure_config": FailureConfig(preemption_grace_s=5.0)},
            "failure_config.preemption_grace_s is 5.0",
        ),
        (
            {"checkpoint_config": CheckpointConfig(checkpoint_score_attribute="loss")},
            "checkpoint_score_attribute is 'loss'",
        ),
        (
            {
                "checkpoint_config": CheckpointConfig(
                    num_to_keep=2, checkpoint_score_attribute="evaluation_loss"
                )
            },
            "checkpoint_score_order 'max'",
        ),
        (
            {
                "checkpoint_config": CheckpointConfig(
                    checkpoint_score_attribute="evaluation_loss", checkpoint_score_order="min"
                )
            },
            "num_to_keep is None",
        ),
    ],
)
def test_what_has_no_meaning_here_is_refused_by_name(options, named):
    with pytest.raises(ConfigError, match=named):
        configured(**options)


def test_the_best_checkpoints_are_those_of_the_lowest_evaluation_loss():
    scored = CheckpointConfig(
        num_to_keep=2,
        checkpoint_score_attribute="evaluation_loss",
        checkpoint_score_order="min",
    )
    evaluated = {**JOB, "evaluation": {"source": "held_out.txt", "every_steps": 50}}
    section = configured(evaluated, checkpoint_config=scored).checkpoint
    assert (section.keep, section.keep_best) == (1, 2)
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        configured(checkpoint_config=scored)


def test_ray_trains_old_configuration_is_refused():
    from ray.air.config import RunConfig as Old

    with pytest.raises(ConfigError, match="give a ray"):
        autohet.ElasticTrainer(JOB, run_config=Old())


def step(number, loss, generation=1):
    facts = {"loss": loss, "gradient_norm": 1.0, "tokens": 64, "seconds": 0.5, "time": 1.0}
    return {"kind": "step", "step": number, "generation": generation, **facts}


def fit(tmp_path, monkeypatch, outcome, steps=(1, 2, 3, 4)):
    """A fit whose run is replaced: it tells of four steps, one of them twice, and leaves
    checkpoints after `steps`.
    """

    def train(job, *, callbacks, events_path, **_):
        assert events_path == tmp_path / "store" / "toy" / "events.jsonl"
        for event in (step(0, 3.0), step(1, 2.5), step(2, 9.0), step(2, 2.2, 2), step(3, 2.0, 2)):
            for callback in callbacks:
                callback.on_event(event)
        storage = open_storage(job.checkpoint_storage)
        for number in steps:
            make_checkpoint(storage, number)
        return outcome

    monkeypatch.setattr(elastic_trainer, "train", train)
    return autohet.ElasticTrainer(
        JOB, run_config=RunConfig(storage_path=str(tmp_path / "store"))
    ).fit()


SUMMARY = {"steps_lost": 1, "generations": 2, "checkpoint": "s3://b/toy/step-00000004"}


def test_a_result_has_metrics_checkpoints_and_path(tmp_path, monkeypatch):
    result = fit(tmp_path, monkeypatch, Outcome(True, "trained to the last step", SUMMARY), (2, 4))
    assert (result.metrics["step"], result.metrics["loss"], result.metrics["tokens_per_s"]) == (
        3,
        2.0,
        128.0,
    )
    assert (result.metrics["steps_lost"], result.metrics["generations"]) == (1, 2)
    assert list(result.metrics_dataframe["loss"]) == [
        3.0,
        2.5,
        2.2,
        2.0,
    ]  # the step that was lost counts as it was run last
    assert result.path == str(tmp_path / "store" / "toy")
    assert result.error is None
    with result.checkpoint.as_directory() as directory:
        assert directory.endswith("toy/step-00000004")
    assert result.get_best_checkpoint("loss", "max").path.endswith("step-00000002")
    assert (
        FileSystemReader(result.checkpoint.path).read_metadata().state_dict_metadata
    )  # stock PyTorch reads it


def test_a_run_that_ends_early_raises_what_ray_train_raises(tmp_path, monkeypatch):
    with pytest.raises(
        TrainingFailedError, match=r"5 failures in a row; .*goes on from s3://b/toy/step-00000004"
    ) as raised:
        fit(tmp_path, monkeypatch, Outcome(False, "5 failures in a row", SUMMARY), ())
    assert raised.value.result.metrics["loss"] == 2.0
    assert raised.value.result.checkpoint is None


def test_a_job_that_was_done_before_has_its_checkpoint_and_no_new_metrics():
    assert History().rows() == []
