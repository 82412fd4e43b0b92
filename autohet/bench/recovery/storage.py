"""Durable storage of the recovery benchmark, and the checkpoint in it.

It is an S3 protocol server on this machine if moto is installed, else a directory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedConfig

from autohet.bench.recovery.cases import CHECKPOINT_STEP, NUM_LAYERS
from autohet.bench.recovery.content import known_state
from autohet.runtime.facts.layout import tensor_specs
from recovery.checkpoint.commit import CheckpointFacts, CheckpointPart, commit_checkpoint
from recovery.checkpoint.write import write_shards
from recovery.state.layout import Layout
from recovery.storage.open import open_storage

BUCKET = "bench-recovery"
# Moto's server reads a whole object for each ranged GET: files of one request's size.
MAX_FILE_BYTES = 16 << 20


@contextmanager
def object_storage(directory: str) -> Iterator[tuple[str, str]]:
    """Yield the storage's URI and a description of it.

    The environment points S3 clients of this process and its children at it meanwhile.
    """
    try:
        from moto.server import ThreadedMotoServer
    except ImportError:
        yield (
            f"{directory}/durable",
            "a directory of this machine (moto, for an S3 server, is not installed)",
        )
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with pointed_at(f"http://{host}:{port}"):
            _create_bucket()
            yield (
                f"s3://{BUCKET}/job",
                "an S3 protocol server on this machine (moto), read over HTTP by boto3",
            )
    finally:
        server.stop()


@contextmanager
def pointed_at(endpoint: str) -> Iterator[None]:
    """Point S3 clients of this process and its children to `endpoint`, by the environment."""
    environment = {
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": endpoint,
    }
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})


def _create_bucket() -> None:
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    client.close()


def committed_checkpoint(
    uri: str, config: PreTrainedConfig, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write and commit the checkpoint of CHECKPOINT_STEP, layer by layer to use little memory."""
    tensors = tensor_specs(config)
    storage = open_storage(uri)
    receipts = []
    try:
        for part in range(NUM_LAYERS):
            mine = dict(sorted(tensors.items())[part::NUM_LAYERS])
            writer = f"writer-{part}"
            shards = frozenset(shard for spec in mine.values() for shard in spec.shards)
            layout = Layout(mine, {writer: shards})
            state = known_state(layout, writer, CHECKPOINT_STEP)
            receipts.append(
                write_shards(
                    CheckpointPart(storage, CHECKPOINT_STEP, writer, max_file_bytes),
                    state,
                    layout,
                    shards,
                )
            )
        commit_checkpoint(
            storage,
            CHECKPOINT_STEP,
            Layout(tensors, {}),
            receipts,
            CheckpointFacts({"seed": 0}, {"model_type": "llama"}),
        )
    finally:
        storage.close()
