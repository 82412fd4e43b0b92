"""The job document: what it takes, what it refuses, and what its refusals say."""

import importlib
import json
import pickle
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from autohet.driver.callbacks.trackers import TRACKERS
from autohet.driver.job.elastic_trainer import as_job
from autohet.runtime.job import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    EmulationSection,
    EvaluationSection,
    Job,
    ModelSection,
    ParallelismSection,
    ScriptedEvent,
    Timeouts,
    TrainingSection,
)
from autohet.runtime.job.elastic import NOTICE_SOURCES, SOURCE_KEYS
from autohet.runtime.job.emulated_profile import emulated_profile
from autohet.runtime.job.other_names import (
    KEY_BY_OTHER_NAME,
    OTHER_NAMES,
    WITHOUT_KEY,
    reason_without_key,
)
from autohet.runtime.job.trackers import TrackerKind
from planner.errors import ConfigError
from planner.inputs.profile import ProfileKey
from planner.strategies import STRATEGIES

BATCH = {"global_batch_sequences": 8, "sequence_length": 16}


def minimal(**sections: Any) -> dict[str, Any]:
    return {
        "model": {"config": {"model_type": "llama", "hidden_size": 8}},
        "training": dict(BATCH),
        **sections,
    }


def muon(**keys: Any) -> dict[str, Any]:
    return minimal(training={**BATCH, "optimizer": "muon", **keys})


def trainable(**sections: Any) -> dict[str, Any]:
    document = minimal(data={"source": "builtin:python-stdlib"}, **sections)
    document["training"]["steps"] = 3
    return document


def test_what_plan_needs_is_enough_and_the_rest_has_defaults() -> None:
    job = Job.from_document(minimal())
    assert (job.training.precision, job.training.recompute, job.parallelism.strategy) == (
        "bf16",
        "auto",
        "autohet",
    )
    assert job.data is None
    assert job.emulation is None
    assert job.checkpoint_storage == "runs/job/checkpoints"


def test_a_strategy_that_does_not_exist_is_refused_where_the_job_is_loaded() -> None:
    for strategy in STRATEGIES:
        job = Job.from_document(minimal(parallelism={"strategy": strategy}))
        assert job.parallelism.strategy == strategy
    with pytest.raises(ConfigError, match=r"parallelism\.strategy is 'evn', .*autohet, metis"):
        Job.from_document(minimal(parallelism={"strategy": "evn"}))


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 1),
        ({"snapshot_every_steps": 5}, 1),
        ({"replicate_every_steps": 0}, 0),
        ({"replicate_every_steps": 7}, 7),
        ({"snapshot_every_steps": 0}, 0),
        ({"snapshot_every_steps": 0, "replicate_every_steps": 0}, 0),
    ],
)
def test_copies_are_made_where_there_are_snapshots(given: dict[str, int], steps: int) -> None:
    assert Job.from_document(minimal(checkpoint=given)).checkpoint.replication_steps == steps


def test_round_trip_and_pickle() -> None:
    job = Job.from_document(
        trainable(
            elastic={"script": [{"at_step": 3, "event": "death", "node_type": "g5"}]},
            emulation={"relative_speed_by_gpu_type": {"A10G": 1, "L40S": 2.0}},
        )
    )
    assert Job.from_document(job.to_document()) == job
    assert pickle.loads(pickle.dumps(job)) == job


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"trainning": {}}, ["trainning", "did you mean training?"]),
        (
            minimal(training={"sequnce_length": 1}),
            ["training.sequnce_length", "did you mean training.sequence_length?"],
        ),
        (minimal(elastic={"script": [{"at_stp": 1}]}), ["elastic.script[0].at_stp", "at_step?"]),
        (minimal(data={"zzz": 1}), ["data.zzz", "known here: source, format"]),
        (minimal(training={"global_batch_sequences": 8}), ["lacks training.sequence_length"]),
        ({"training": {"global_batch_sequences": 8, "sequence_length": 16}}, ["lacks model"]),
        (minimal(training="x"), ["training is 'x'", "expected a mapping"]),
        (
            minimal(model={"pretrained": "x", "adapter": "qlora"}),
            ["model.adapter is 'qlora'", "a mapping of keys (kind, from, rank, alpha, ...) | null"],
        ),
        (minimal(model={}), ["exactly one of config", "pretrained"]),
        (minimal(model={"config": {"model_type": "llama"}, "pretrained": "x"}), ["exactly one"]),
        (minimal(model={"config": {"hidden_size": 8}}), ["model_type"]),
        (
            minimal(parallelism={"microbatch_sequences": 3}),
            ["8", "multiple", "3", "leave microbatch_sequences"],
        ),
        (minimal(parallelism={"min_pipelines": 0}), ["min_pipelines is 0", "at least 1"]),
        (minimal(parallelism={"max_pipelines": 2}), ["max_pipelines"]),
        (minimal(elastic={"step_timeout_s": 0}), ["elastic.step_timeout_s is 0", "more than 0"]),
        (
            minimal(elastic={"notice_sources": ["gcp"]}),
            ["'gcp'", "ray, aws, gpu, queue, file, script"],
        ),
        (
            minimal(elastic={"notice_sources": ["queue"]}),
            ["names 'queue'", "needs elastic.notice_queue", "remove 'queue'"],
        ),
        (
            minimal(elastic={"notice_sources": ["ray", "file"]}),
            ["names 'file'", "needs elastic.notice_file or elastic.notice_command", "remove"],
        ),
        (
            minimal(elastic={"notice_sources": ["ray"], "notice_file": "/tmp/n"}),
            ["elastic.notice_file is set", "notice_sources is [ray] without 'file'", "add 'file'"],
        ),
        (
            minimal(elastic={"notice_sources": ["ray", "aws"], "notice_queue": "https://q"}),
            ["elastic.notice_queue is set", "[ray, aws] without 'queue'", "add 'queue'"],
        ),
        (
            minimal(elastic={"notice_file": "/tmp/n", "notice_command": ["cat", "/tmp/n"]}),
            ["elastic.notice_file and elastic.notice_command are both set", "remove one"],
        ),
        (
            minimal(elastic={"script": [{"at_step": 1, "event": "arrival"}]}),
            ["arrival needs node_type"],
        ),
        (
            minimal(elastic={"script": [{"at_step": 1, "event": "storm"}]}),
            ["notice, death, arrival, freeze"],
        ),
        (minimal(emulation={}), ["exactly one of profile"]),
        (minimal(checkpoint={"every_steps": 0}), ["checkpoint.every_steps is 0", "at least 1"]),
        (
            minimal(checkpoint={"snapshot_every_steps": 0, "replicate_every_steps": 2}),
            [
                "checkpoint.replicate_every_steps is 2",
                "checkpoint.snapshot_every_steps is 0",
                "leave",
            ],
        ),
        (minimal(data={"source": []}), ["data.source is empty"]),
        (
            minimal(data={"source": "a", "kind": "chat", "text_field": "body"}),
            ["data.text_field is 'body'", "no effect without data.kind: text"],
        ),
        (
            minimal(data={"source": "a", "tokens_field": "ids", "text_field": "body"}),
            ["data.text_field is 'body'", "no effect without data.tokens_field: null"],
        ),
        (
            minimal(data={"source": "a", "messages_field": "turns"}),
            ["data.messages_field is 'turns'", "no effect without data.kind: chat"],
        ),
        (
            minimal(data={"source": [{"path": "a.jsonl", "split": "test"}]}),
            ["data.source.split is 'test'", "no effect without a path hf://"],
        ),
        (minimal(name="a/b"), ["'a/b'"]),
        (muon(offload="optimizer"), ["training.offload is optimizer", "leave offload out"]),
        (muon(optimizer_sharding="off"), ["optimizer_sharding is off", "one owner each"]),
        (muon(muon_momentum=1), ["training.muon_momentum is 1", "[0, 1)"]),
        (minimal(training={**BATCH, "muon_adjust": "original"}), ["training.optimizer: muon"]),
        (minimal(training={**BATCH, "optimizer": "adamw_torch"}), ["adamw_torch is adamw here"]),
        ({**muon(), "parallelism": {"spmd": True}}, ["parallelism.spmd does not allow"]),
        (
            {**muon(), "parallelism": {"redundancy": 2}},
            ["one owner each", "parallelism.redundancy"],
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(document: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Job.from_document(document)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "elastic",
    [
        {},
        {"notice_sources": list(reversed(NOTICE_SOURCES))},
        {"notice_queue": "https://q"},
        {"notice_sources": ["queue", "file"], "notice_queue": "https://q", "notice_file": "/n"},
        {"notice_sources": ["file"], "notice_command": ["true"]},
        {"notice_sources": []},
    ],
)
def test_all_sources_means_those_that_are_configured(elastic: dict[str, Any]) -> None:
    Job.from_document(minimal(elastic=elastic))


def test_each_key_of_a_source_is_checked_for_its_effect() -> None:
    """A new key outside the table could be set, or be missing, without effect or message."""
    checked = {key for keys in SOURCE_KEYS.values() for key in keys}
    notice_keys = {field.name for field in fields(ElasticSection) if "notice_" in field.name}
    assert notice_keys - {"notice_sources"} == checked
    assert set(SOURCE_KEYS) <= set(NOTICE_SOURCES)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("steps", "ten", ["training.steps is 'ten'", "expected int"]),
        ("steps", True, ["training.steps is True"]),
        ("steps", 0, ["training.steps is 0", "at least 1"]),
        ("precision", "fp8", ["training.precision is 'fp8'", "fp32, bf16, fp16"]),
        ("betas", [0.9], ["training.betas"]),
        ("betas", [0.9, 1.0], ["training.betas holds 1.0"]),
        ("learning_rate", float("nan"), ["training.learning_rate is nan"]),
        ("min_learning_rate_ratio", 2, ["min_learning_rate_ratio is 2", "[0, 1]"]),
        ("clip_norm", -1, ["training.clip_norm is -1"]),
        ("warmup_steps", 11, ["warmup_steps is 11", "10 steps"]),
    ],
)
def test_training_values(key: str, value: object, words: list[str]) -> None:
    document = minimal()
    document["training"] |= {"steps": 10, key: value}
    with pytest.raises(ConfigError) as caught:
        Job.from_document(document)
    for word in words:
        assert word in str(caught.value)


def test_train_needs_steps_data_and_a_precision_of_its_programs() -> None:
    assert Job.from_document(trainable()).require_training() == DataSection(
        source="builtin:python-stdlib"
    )
    with pytest.raises(ConfigError, match=r"training\.steps is missing"):
        Job.from_document(minimal()).require_training()
    document = trainable()
    del document["data"]
    with pytest.raises(ConfigError, match="lacks data"):
        Job.from_document(document).require_training()
    document = trainable()
    document["training"]["precision"] = "fp16"
    Job.from_document(document).require_training()
    document["parallelism"] = {"spmd": True}
    with pytest.raises(ConfigError, match="its programs train in bf16 or fp32 alone"):
        Job.from_document(document).require_training()


def test_yaml_numbers_names_and_files(tmp_path: Path) -> None:
    path = tmp_path / "my-run.yaml"
    path.write_text(
        "model: {pretrained: some/where}\ntraining: {global_batch_sequences: 8, sequence_length:"
        " 16, learning_rate: 3e-4, eps: 1E-8, clip_norm: null}\n"
    )
    job = Job.from_yaml(path)
    assert (job.name, job.training.learning_rate, job.training.eps) == ("my-run", 3e-4, 1e-8)
    assert job.training.clip_norm is None


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"model: [", "not valid YAML"),
        (b"- a\n", "not a mapping"),
        (b"", "not a mapping"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"name: a\nname: b\n", "line 2: the key 'name' is given twice"),
        (b"training: {steps: 1, steps: 2}\n", "'steps' is given twice"),
        (b"? [a]\n: 1\n", "a key must be"),
    ],
)
def test_files_that_are_no_job(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Job.from_yaml(path)
    assert word in str(caught.value)
    assert "bad.yaml" in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        Job.from_yaml(tmp_path / "nowhere.yaml")


def test_time_outs_follow_the_step_unless_given() -> None:
    derived = ElasticSection(step_timeout_s=120).timeouts()
    assert (derived.heartbeat_s, derived.quiesce_s, derived.rendezvous_s) == (20, 60, 120)
    assert (derived.worker_start_s, derived.transfer_s, derived.checkpoint_s) == (360, 600, 1200)
    given = ElasticSection(
        step_timeout_s=120, heartbeat_timeout_s=3, transfer_timeout_s=7
    ).timeouts()
    assert (given.heartbeat_s, given.transfer_s) == (3, 7)
    assert ElasticSection(step_timeout_s=60).arrivals_debounce_s == 2
    assert ElasticSection(debounce_s=0).arrivals_debounce_s == 0


def test_sections_check_themselves_when_built_in_code() -> None:
    with pytest.raises(ConfigError, match="global_batch_sequences is 0"):
        TrainingSection(global_batch_sequences=0, sequence_length=1)


def test_emulated_profile_is_as_fast_as_its_speeds_say() -> None:
    emulation = EmulationSection(
        relative_speed_by_gpu_type={"A10G": 1.0, "L40S": 2.0}, block_forward_s=0.01, scale=3
    )
    table = emulated_profile(
        emulation, model="m", dtypes=["fp32"], sequence_length=16, max_microbatch_sequences=2
    )
    slow = table.layers(ProfileKey("m", "A10G", "fp32", 16, 1))["block"]
    fast = table.layers(ProfileKey("m", "L40S", "fp32", 16, 1))["block"]
    assert (slow[1].forward_s, slow[1].backward_s) == pytest.approx((0.03, 0.06))
    assert fast[2].forward_s == pytest.approx(slow[1].forward_s)
    split = table.layers(ProfileKey("m", "A10G", "fp32", 16, 2))["block"]
    assert slow[1].forward_s / 2 < split[1].forward_s < slow[1].forward_s


def readers(name: str) -> list[str]:
    """Files of the product that read an attribute of this name, those left out that only say what
    may be in it.
    """
    root = Path(__file__).parents[3]
    sections = root / "autohet" / "runtime" / "job"
    read_elsewhere = {"__init__.py", "identity.py", "learning_rate.py", "emulated_profile.py"}
    files = [
        f
        for f in (root / "autohet").rglob("*.py")
        if f.parent != sections or f.name in read_elsewhere
    ]
    return [str(f) for f in files if re.search(rf"\.{name}\b", f.read_text())]


@pytest.mark.parametrize(
    "section",
    [
        TrainingSection,
        ModelSection,
        DataSection,
        CheckpointSection,
        EmulationSection,
        EvaluationSection,
        ParallelismSection,
        ScriptedEvent,
        Timeouts,
    ],
)
def test_every_option_is_acted_upon(section: type) -> None:
    derived = {
        "replicate_every_steps": "replication_steps",
        "min_learning_rate_ratio": "floor_ratio",
        "stable_steps": "wsd_decay",
        "dpo_beta": "preference_beta",
        "router_balance_weight": "balance_weight",
        "at_start": "is_due",
    }
    assert [f.name for f in fields(section) if not readers(derived.get(f.name, f.name))] == []


def test_every_elastic_option_is_acted_upon() -> None:
    """Time-outs by way of `Timeouts`, whose every field is read too."""
    names = {f.name for f in fields(ElasticSection)}
    given = {name for name in names if name.endswith("_timeout_s")}
    assert [
        name
        for name in names - given
        if name not in ("debounce_s", "wait_for_fleet_s") and not readers(name)
    ] == []
    plain = ElasticSection(step_timeout_s=60)
    for name in given:
        assert replace(plain, **{name: 7.0}).timeouts() != plain.timeouts(), name
    assert replace(plain, debounce_s=7.0).arrivals_debounce_s == 7.0
    assert readers("arrivals_debounce_s")
    assert readers("fleet_patience_s")


def test_a_steps_time_out_follows_its_prediction_and_nothing_else_does() -> None:
    """Wrong: a step of two minutes is taken for frozen after one; or a worker's silence is borne as
    long as a step may take.
    """
    section = ElasticSection()
    assert section.timeouts(2.0) == section.timeouts()
    slow = section.timeouts(120.0)
    assert slow.step_s == 1200.0
    assert replace(slow, step_s=60.0) == section.timeouts()
    assert (
        ElasticSection(step_timeout_s=90).timeouts(120.0)
        == ElasticSection(step_timeout_s=90).timeouts()
    )
    assert "a step 1200 s, silence of a worker 10.0 s" in str(slow)


def test_values_from_python_are_taken_as_yaml_gives_them(tmp_path: Path) -> None:
    document = trainable(
        name=np.str_("mine"),
        checkpoint={"storage": tmp_path, "every_steps": np.int32(5)},
        elastic={"slow_ratio": np.float32(2.0)},
        parallelism={"plan": tmp_path / "plan.json"},
    )
    document["model"] = {"pretrained": tmp_path / "model"}
    document["training"] |= {
        "global_batch_sequences": np.int64(8),
        "learning_rate": np.float64(1e-3),
        "steps": torch.tensor(3),
        "betas": np.array([0.5, 0.75]),
        "compile_blocks": np.bool_(True),
    }
    document["data"] = {"source": [tmp_path / "a.txt", tmp_path / "b.txt"]}
    job = Job.from_document(document)
    assert job.model.pretrained == str(tmp_path / "model")
    assert job.data is not None
    assert job.data.source == (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    assert job.training.betas == (0.5, 0.75)
    assert job.training.compile_blocks is True
    assert (job.checkpoint.storage, job.parallelism.plan) == (
        str(tmp_path),
        str(tmp_path / "plan.json"),
    )
    plain = json.loads(json.dumps(job.to_document()))
    assert Job.from_document(plain) == job


def test_a_config_of_transformers_is_taken_as_its_mapping() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, dtype=torch.bfloat16)
    job = Job.from_document(minimal(model={"config": config}))
    assert job.model.config is not None
    assert (job.model.config["model_type"], job.model.config["hidden_size"]) == ("llama", 64)
    json.dumps(job.to_document())


def test_a_value_of_no_such_type_is_still_refused() -> None:
    document = minimal()
    document["training"]["global_batch_sequences"] = np.float64(8.5)
    with pytest.raises(ConfigError, match=r"global_batch_sequences is 8\.5"):
        Job.from_document(document)


def test_a_job_made_by_its_constructors_is_checked_too(tmp_path: Path) -> None:
    training = TrainingSection(
        global_batch_sequences=np.int64(8),  # type: ignore[arg-type]
        sequence_length=16,
    )
    model = ModelSection(pretrained=tmp_path)  # type: ignore[arg-type]
    job = as_job(Job(model=model, training=training))
    assert type(job.training.global_batch_sequences) is int
    assert job.model.pretrained == str(tmp_path)
    with pytest.raises(ConfigError, match="pretrained is 3"):
        as_job(Job(model=ModelSection(pretrained=3), training=training))  # type: ignore[arg-type]


OTHERS = ("trl.SFTConfig", "trl.DPOConfig", "peft.LoraConfig")
FAMILIAR = (
    "max_grad_norm gradient_checkpointing gradient_checkpointing_kwargs packing optim bf16 tf32"
    " neftune_noise_alpha save_strategy load_best_model_at_end early_stopping_patience report_to"
    " lora_r use_dora load_in_4bit target_parameters sample_packing pad_to_sequence_len"
    " micro_batch_size val_set_size logging_steps deepspeed fsdp_config dataloader_num_workers"
    " group_by_length data_seed flash_attention attn_implementation push_to_hub hub_model_id"
    " resume_from_checkpoint per_device_eval_batch_size evals_per_epoch saves_per_epoch adapter"
    " special_tokens rope_scaling template stage plot_loss bias precompute_ref_log_probs"
    " type roles add_bos_token streaming shuffle max_samples max_train_samples"
    " truncation_mode max_prompt_length pad_token dataset_num_proc use_cache remove_unused_columns"
    " pretraining_dataset eot_tokens plugins strict debug default_system_message peft_use_dora"
    " loss_watchdog_threshold tokenizer_use_fast flex_attention ds_type enable_liger_kernel"
    " eval_batch_size skip_prepare_dataset use_wandb added_tokens_overrides"
)
"""Keys of everyday configs of TRL, axolotl and LLaMA-Factory, which all get an answer."""


def test_all_unknown_keys_are_named_at_once() -> None:
    """Wrong: the first alone, so that a config of axolotl takes forty attempts."""
    document = {"base_model": "a", "lora_r": 8, **minimal(data={"source": [{"type": "x"}]})}
    with pytest.raises(ConfigError) as caught:
        Job.from_document(document)
    keys = [line.split()[2] for line in str(caught.value).splitlines()]
    assert keys == ["base_model", "lora_r", "data.source[0].type"]


def test_other_libraries_names_lead_to_the_keys_here() -> None:
    """Wrong: a name that no library has, or a key that no job has."""
    theirs: set[str] = set()
    for path in OTHERS:
        module, _, name = path.partition(".")
        theirs |= {f.name for f in fields(getattr(importlib.import_module(module), name))}
    for name, key in KEY_BY_OTHER_NAME.items():
        section, *rest = key.split(".")
        cls = get_type_hints(Job)[section]
        for part in rest:
            options = [each for each in (cls, *get_args(cls)) if is_dataclass(each)]
            hints = get_type_hints(options[0])
            cls = hints.get(part, hints.get(f"{part}_"))
            assert cls is not None
        document = trainable()
        document["training"][name] = 1
        with pytest.raises(ConfigError, match=rf"training\.{name} .*did you mean {key}\?"):
            Job.from_document(document)
    wanted = {"max_steps", "adam_beta1", "save_steps", "max_grad_norm", "max_length", "beta", "r"}
    assert wanted <= theirs & KEY_BY_OTHER_NAME.keys()
    assert len(theirs & KEY_BY_OTHER_NAME.keys()) > 40
    names = {*theirs, *FAMILIAR.split()}
    answered = {each for each in names if reason_without_key(each)} | KEY_BY_OTHER_NAME.keys()
    assert set(FAMILIAR.split()) - answered == {"packing", "early_stopping_patience"}, (
        "our own keys"
    )
    assert len(theirs - answered) < 40, "few of the libraries' names get no answer"
    for name in ("optim_args", "hub_token", "deepspeed", "plot_loss", "bias"):
        reason = reason_without_key(name)
        document = trainable()
        document["training"][name] = 1
        with pytest.raises(ConfigError) as caught:
            Job.from_document(document)
        assert str(caught.value) == f"unknown key training.{name} in the job; {reason}"
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "own_data.md").read_text()
    lines = [
        f"| {', '.join(f'`{n}`' for n in OTHER_NAMES[key])} | `{key}` |" for key in OTHER_NAMES
    ]
    for reason, without in WITHOUT_KEY.items():
        lines.append(f"| {', '.join(f'`{n}`' for n in without)} | {reason} |")
    assert [line for line in lines if line not in guide] == []


@pytest.mark.parametrize(
    ("section", "keys", "choices"),
    [
        ("training", {"schedule": "cosine_with_restarts"}, "cosine, linear, constant, wsd"),
        ("training", {"recompute": True}, "none, selective, full, offload, auto, if_needed"),
        ("training", {"precision": "bfloat16"}, "fp32, bf16, fp16"),
        ("training", {"compile_blocks": "max"}, "true, false, auto"),
        ("data", {"packing": True}, "concat, best_fit"),
        ("data", {"train_on": ["assistant"]}, "assistant, completion, turns, all"),
    ],
)
def test_a_value_of_another_library_is_answered_with_the_choices(
    section: str, keys: dict[str, Any], choices: str
) -> None:
    document = trainable()
    document[section].update(keys)
    (key,) = keys
    with pytest.raises(ConfigError, match=rf"{section}\.{key} is .*: use one of {choices}"):
        Job.from_document(document)


@pytest.mark.parametrize(
    ("section", "key", "value", "ours"),
    [
        ("training", "schedule", "constant_with_warmup", "constant"),
        ("training", "schedule", "warmup_stable_decay", "wsd"),
        ("training", "precision", "bfloat16", "bf16"),
        ("training", "objective", "sft", "cross_entropy"),
        ("data", "packing", "wrapped", "concat"),
        ("data", "kind", "alpaca", "prompt_completion"),
        ("data", "kind", "dpo", "preference"),
    ],
)
def test_a_value_that_has_another_word_here_leads_to_it(
    section: str, key: str, value: str, ours: str
) -> None:
    document = trainable()
    document[section][key] = value
    with pytest.raises(ConfigError, match=rf"use one of .*; {value} is {ours} here$"):
        Job.from_document(document)


def test_a_tracker_that_there_is_not_is_refused_with_the_choices() -> None:
    """Wrong: refused once Ray has started."""
    assert get_args(TrackerKind) == tuple(TRACKERS)
    for entry, key in (("comet", ""), ({"kind": "comet"}, ".kind")):
        document = {**trainable(), "trackers": ["wandb", entry]}
        with pytest.raises(ConfigError) as caught:
            Job.from_document(document)
        assert f"trackers[1]{key} is 'comet' in the job: use one of tensor" in str(caught.value)


def test_a_key_of_another_section_is_named_by_its_path() -> None:
    document = {**trainable(), "learning_rate": 1e-5}
    with pytest.raises(ConfigError, match=r"did you mean training\.learning_rate\?"):
        Job.from_document(document)
