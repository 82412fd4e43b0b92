"""How fast token datasets are built and read, beside plain numpy on an array in memory. One JSON
document on stdout.

python -m scripts.benchmarks.step.data_throughput [--megabytes 200] [--out FILE]
"""

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from autohet.runtime.data import TokenDataset, prepare_dataset, sample_rows
from autohet.runtime.data.sources import list_sources
from autohet.runtime.job import DataSection

SEQUENCE_LENGTH = 1024
BATCH_ROWS = 64
REPEATS = 200


def write_corpus(path: Path, megabytes: int) -> None:
    """Python's own sources, again and again, as JSONL documents of about 4 kB."""
    files = list_sources(DataSection(source="builtin:python-stdlib"))
    text = "".join(Path(file.name).read_text(encoding="utf-8") for file in files)
    lines = [
        json.dumps({"text": text[start : start + 4000]}) + "\n"
        for start in range(0, len(text), 4000)
    ]
    with path.open("w") as stream:
        while stream.tell() < megabytes * 1e6:
            stream.writelines(lines)


def train_bpe(corpus: Path, path: Path) -> None:
    """A byte-level BPE of 8000 tokens, trained on the head of the corpus."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    with corpus.open() as stream:
        texts = [json.loads(line)["text"] for _, line in zip(range(500), stream, strict=False)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure_reading(dataset: TokenDataset) -> dict[str, float]:
    """Rows a second in the run's own order, and of numpy on the same tokens copied to memory,
    random rows.
    """
    memory = dataset.rows(np.arange(len(dataset))).astype(dataset.facts.token_dtype)
    random = np.random.default_rng(0)

    def ours() -> None:
        for step in range(REPEATS):
            dataset.rows(sample_rows(0, len(dataset), step * BATCH_ROWS, BATCH_ROWS))

    def plain() -> None:
        for _ in range(REPEATS):
            memory[random.integers(0, len(memory), BATCH_ROWS)].astype(np.int64)

    total = REPEATS * BATCH_ROWS
    return {
        "rows_per_s": total / seconds(ours),
        "numpy_in_memory_rows_per_s": total / seconds(plain),
    }


def measure(corpus: Path, tokenizer: str, directory: Path) -> dict[str, Any]:
    data = DataSection(source=str(corpus), tokenizer=tokenizer, cache=str(directory / "cache"))
    build_s = seconds(lambda: prepare_dataset(data, SEQUENCE_LENGTH))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    open_s = seconds(lambda: prepare_dataset(data, SEQUENCE_LENGTH))
    dataset = prepare_dataset(data, SEQUENCE_LENGTH)
    return {
        "tokenizer": Path(tokenizer).stem,
        "source_bytes": corpus.stat().st_size,
        "tokens": len(dataset) * (SEQUENCE_LENGTH + 1),
        "build_s": build_s,
        "build_bytes_per_s": corpus.stat().st_size / build_s,
        "build_tokens_per_s": len(dataset) * (SEQUENCE_LENGTH + 1) / build_s,
        "process_peak_memory_bytes": peak * 1024,
        "open_s": open_s,
        "verify_s": seconds(dataset.verify),
        "sequence_length": SEQUENCE_LENGTH,
        "batch_rows": BATCH_ROWS,
        **measure_reading(dataset),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        corpus, bpe = directory / "corpus.jsonl", directory / "bpe.json"
        write_corpus(corpus, arguments.megabytes)
        train_bpe(corpus, bpe)
        spawn = multiprocessing.get_context(
            "spawn"
        )  # a process for each, so that its peak memory is its own
        with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
            tokenizers = ("bytes", str(bpe))
            results = list(
                pool.map(measure, [corpus] * 2, tokenizers, [directory] * 2, timeout=1800)
            )
    text = json.dumps({"results": results}, indent=2)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
