"""Durable storage of the recovery benchmark, an S3 protocol server, and the checkpoint in it."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

from transformers import PreTrainedConfig

from autohet.bench.recovery.cases import CHECKPOINT_STEP, NUM_LAYERS
from autohet.bench.recovery.content import known_state
from autohet.bench.recovery.object_server import ObjectServer
from autohet.runtime.facts.layout import tensor_specs
from recovery.checkpoint.commit import CheckpointFacts, CheckpointPart, commit_checkpoint
from recovery.checkpoint.write import write_shards
from recovery.state.layout import Layout
from recovery.storage.open import open_storage

BUCKET = "bench-recovery"
MAX_FILE_BYTES = 64 << 20


@contextmanager
def object_storage(directory: str) -> Iterator[str]:
    """Serve a directory as S3; yield the storage's URI.

    The environment points S3 clients of this process and its children at it meanwhile.
    """
    with (
        closing(ObjectServer(directory, "127.0.0.1")) as server,
        point_s3_clients_at(server.endpoint),
    ):
        yield f"s3://{BUCKET}/job"


@contextmanager
def point_s3_clients_at(endpoint: str) -> Iterator[None]:
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


def commit_known_checkpoint(uri: str, config: PreTrainedConfig) -> None:
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
                    CheckpointPart(storage, CHECKPOINT_STEP, writer, MAX_FILE_BYTES),
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
