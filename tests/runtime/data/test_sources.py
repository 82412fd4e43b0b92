"""Weighted sources and data sets of the hub, against plain counts and the datasets library."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from autohet.runtime.data import TokenDataset, prepare_dataset
from autohet.runtime.data.sample_order import MIX_PERIOD, mix_quotas, mixed_rows
from autohet.runtime.job import DataSection, Job
from autohet.runtime.job.data import SourceEntry
from autohet.runtime.step.batches import Batches
from planner.errors import ConfigError
from tests.harness.chat_tokenizer import save_chat_tokenizer
from tests.runtime.data.test_chat import conversations
from tests.runtime.data.test_dataset import all_rows, expected_rows, write_jsonl

MakeData = Callable[..., DataSection]


def test_a_mix_is_a_function_of_the_position() -> None:
    """Wrong: cut anywhere the order differs, a source's rows repeat within its epoch, or weights
    are met by chance alone.
    """
    sizes, weights = (7, 100, 3), (1.0, 2.0, 0.01)
    whole = mixed_rows(5, sizes, weights, 0, 2 * MIX_PERIOD + 77)
    parts = [mixed_rows(5, sizes, weights, first, 100) for first in range(0, len(whole) - 99, 100)]
    np.testing.assert_array_equal(np.concatenate(parts), whole[: 100 * len(parts)])
    sources = np.digitize(whole, [7, 107])
    counts = np.bincount(sources[:MIX_PERIOD])
    assert counts.tolist() == mix_quotas(weights).tolist()
    np.testing.assert_allclose(counts / MIX_PERIOD, np.array(weights) / 3.01, atol=1e-4)
    for number, (first, size) in enumerate(zip((0, 7, 107), sizes)):
        mine = Counter((whole[: 2 * MIX_PERIOD][sources[: 2 * MIX_PERIOD] == number]).tolist())
        assert set(mine) == set(range(first, first + size))
        assert max(mine.values()) - min(mine.values()) <= 1, "each epoch has each row once"
    assert (mixed_rows(6, sizes, weights, 0, 500) != whole[:500]).any()
    early = np.bincount(sources[:300], minlength=3) / 300
    assert abs(early[0] - 1 / 3) < 0.15, "sources are mixed within a period"


@pytest.mark.parametrize("marked", [False, True])
def test_weighted_sources_do_not_share_rows(
    tmp_path: Path, make_data: MakeData, marked: bool
) -> None:
    small = write_jsonl(tmp_path / "a.jsonl", [f"small {number}" for number in range(20)])
    large = write_jsonl(tmp_path / "b.jsonl", [f"a large one {number}" for number in range(200)])
    entries = (SourceEntry(path=str(small), weight=3), SourceEntry(path=str(large), weight=1))
    data = DataSection(
        source=entries, cache=str(tmp_path / "cache"), isolate_documents=marked or None
    )
    dataset = prepare_dataset(data, 15)
    alone = [prepare_dataset(make_data(path), 15) for path in (small, large)]
    np.testing.assert_array_equal(
        all_rows(dataset), np.concatenate([all_rows(each) for each in alone])
    )
    assert dataset.facts.rows_by_source == tuple(len(each) for each in alone)
    dataset.verify()
    rows = dataset.sample(0, 0, 8000)
    assert abs((rows < len(alone[0])).mean() - 0.75) < 0.02
    batches = Batches(TokenDataset(dataset.path), 0, 8, torch.device("cpu"))
    tokens, _ = batches(3, range(2, 6))
    np.testing.assert_array_equal(tokens.numpy(), dataset.rows(rows[26:30])[:, :-1])
    other = DataSection(
        source=(entries[0], SourceEntry(path=str(large), weight=2)), cache=data.cache
    )
    assert prepare_dataset(other, 15).facts.content_sha256 != dataset.facts.content_sha256


def test_weights_in_a_job(tmp_path: Path) -> None:
    document = {
        "model": {"config": {"model_type": "llama"}},
        "training": {"global_batch_sequences": 1, "sequence_length": 8},
        "data": {"source": [{"path": "a", "weight": 1}, {"path": "b", "weight": 2.5}]},
    }
    job = Job.from_document(document)
    assert job.data is not None
    assert job.data.weights == (1, 2.5)
    assert Job.from_document(json.loads(json.dumps(job.to_document()))) == job
    document["data"] = {"source": [{"path": "a", "wieght": 1}]}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"data\.source\[0\]\.wieght.*weight"):
        Job.from_document(document)
    document["data"] = {"source": {"path": "hf://a", "split": "b"}}  # type: ignore[dict-item]
    document["evaluation"] = {"source": {"path": "hf://a", "split": "c"}}  # type: ignore[dict-item]
    one = Job.from_document(document)
    assert one.data is not None
    assert one.evaluation_data is not None
    assert [each.split for each in (*one.data.entries, *one.evaluation_data.entries)] == ["b", "c"]
    assert Job.from_document(json.loads(json.dumps(one.to_document()))) == one
    del document["evaluation"]
    document["data"] = {"source": {"path": "a", "wieght": 1}}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"data\.source\.wieght.*weight"):
        Job.from_document(document)
    for source, word in [
        (["a", {"path": "b", "weight": 1}], "2 sources, 1 with a weight"),
        ([{"path": "a", "weight": 0}], "more than 0"),
    ]:
        document["data"] = {"source": source}  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match=word):
            Job.from_document(document)


def test_a_source_of_the_hub(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The datasets library itself reads a directory that lies as a data set of the hub does."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    root = tmp_path / "repository"
    (root / "data").mkdir(parents=True)
    (root / "README.md").write_text("# A data set\n")
    train, test = [f"training {n}" for n in range(30)], [f"testing {n}" for n in range(9)]
    write_jsonl(root / "data" / "train.jsonl", train)
    write_jsonl(root / "data" / "test.jsonl", test)
    source = f"hf://{root}"
    np.testing.assert_array_equal(
        all_rows(prepare_dataset(make_data(source), 15)), expected_rows(train, 16)
    )
    for split, texts in (("test", test), ("train[10:20]", train[10:20])):
        entry = SourceEntry(path=source, split=split)
        data = DataSection(source=(entry,), cache=str(tmp_path / "cache"))
        np.testing.assert_array_equal(all_rows(prepare_dataset(data, 15)), expected_rows(texts, 16))
    wrong = DataSection(source=(SourceEntry(path=source, split="nope"),), cache=data.cache)
    with pytest.raises(ConfigError, match=r"hf://.*split 'nope'.*source\.split"):
        prepare_dataset(wrong, 15)


def test_chat_of_the_hub(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    save_chat_tokenizer(tmp_path / "tokenizer")
    chats = conversations(40)
    root = tmp_path / "repository"
    root.mkdir()
    datasets.Dataset.from_list([{"messages": chat} for chat in chats]).to_parquet(
        str(root / "train.parquet")
    )
    keys = {"kind": "chat", "tokenizer": str(tmp_path / "tokenizer")}
    from_hub = prepare_dataset(make_data(f"hf://{root}", **keys), 255)
    from_file = prepare_dataset(make_data(root / "train.parquet", **keys), 255)
    assert from_hub.facts.content_sha256 == from_file.facts.content_sha256
