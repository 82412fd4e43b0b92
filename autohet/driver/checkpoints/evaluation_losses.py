"""Evaluation losses in a job's checkpoint storage, by which the best checkpoints are known.

They lie beside the checkpoints, since a loss is often known only after its step is committed.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from autohet.control.values.evaluation_log import EvaluationLog
from autohet.runtime.job import EvaluationSection
from autohet.runtime.messages import EVALUATIONS
from recovery.checkpoint.manifest import Manifest
from recovery.errors import RecoveryError
from recovery.storage.errors import ObjectMissing
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet")

EVALUATION_LOSSES = "evaluation.losses"
"""Scalar of checkpoints of earlier releases: a JSON object of losses by step."""


def read_evaluations(
    storage: Storage,
    manifest: Manifest,
    section: EvaluationSection | None = None,
    *,
    whole: bool = False,
) -> EvaluationLog:
    """Return the losses of the run whose newest checkpoint is `manifest`, until its step.

    whole: also those of later steps, from which the run goes on.

    Raises:
        StorageError: the storage does not answer.
    """
    document: Mapping[str, Any] = {}
    try:
        document = json.loads(bytes(storage.get(EVALUATIONS)))
        losses = {int(step): float(loss) for step, loss in document["losses"].items()}
    except ObjectMissing:
        text = manifest.scalars.get(EVALUATION_LOSSES) or "{}"
        losses = {int(step): float(loss) for step, loss in json.loads(str(text)).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s of %s is damaged (%s): no loss is known", EVALUATIONS, storage, error)
        losses = {}
    log = EvaluationLog(section, losses, document.get("rows"))
    if not whole:
        log.go_back_to(manifest.step)
    return log


def store_evaluations(storage: Storage, document: Mapping[str, Any]) -> None:
    """Store the losses; a failure is logged, and the next evaluation stores them all again."""
    try:
        storage.put(EVALUATIONS, json.dumps(document).encode())
    except (RecoveryError, OSError) as error:
        logger.warning("The newest evaluation loss is not in the checkpoint storage: %s", error)
