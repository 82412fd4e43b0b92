"""A run and its checkpoint storage: the facts that checkpoints carry, and what a resume takes."""

from autohet.control.job_memory import JobMemory
from autohet.control.ledger.skipped_steps import SKIPPED_FROM
from autohet.driver.checkpoints.cleaning import Retention
from autohet.driver.checkpoints.durable import Durable, RunFacts
from autohet.driver.checkpoints.evaluation_losses import read_evaluations, store_evaluations
from autohet.driver.checkpoints.resumption import skipped_from
from autohet.runtime.job import Job
from autohet.runtime.job.identity import DATA_DIGEST
from autohet.runtime.models.config import saved_document
from autohet.runtime.state.frozen import run_identity
from autohet.runtime.state.model_files import model_files
from autohet.runtime.step.loss_scale import LOSS_SCALE
from recovery.checkpoint.manifest import Manifest
from recovery.storage.open import open_storage


def make_durable(job: Job) -> Durable:
    """Create the driver's side of the job's checkpoint storage."""
    model = job.model
    document = saved_document(model)
    identity = {"seed": job.training.seed, **run_identity(job)}
    facts = RunFacts(job.name, document, identity, model_files(job, document))
    retention = Retention(job.checkpoint.num_kept, job.checkpoint.keep_best)
    return Durable(open_storage(job.checkpoint_storage), facts, retention)


class CheckpointScalars:
    """Facts of the run so far that its checkpoints carry beside the training state."""

    def __init__(self, job: Job, durable: Durable) -> None:
        self._job = job
        self._durable = durable
        self._recorded: dict[int, float] = {}
        """Evaluation losses by step that the storage has, or is being given."""

    def go_on_from(self, manifest: Manifest, memory: JobMemory, *, inherits: bool = False) -> None:
        """Take over from a checkpoint what its run has to know of the part before it.

        inherits: the run goes on from the state of living workers, which is newer.
        """
        memory.generation = max(memory.generation, manifest.generation)
        memory.ledger.skipped.go_on_from(skipped_from(manifest))
        log = read_evaluations(
            self._durable.storage, manifest, self._job.evaluation, whole=inherits
        )
        memory.ledger.evaluation_log = log
        self._recorded = dict(log.losses)
        self._durable.cleaner.losses = self._recorded

    def expected_data(self, manifest: Manifest) -> str | None:
        """Return the digest of the data that the run must go on with.

        None: an older checkpoint has none, or the job says that its data may change.
        """
        if any(key.startswith("data.") for key in self._job.checkpoint.allow_changes):
            return None
        digest = manifest.scalars.get(DATA_DIGEST)
        return None if digest is None else str(digest)

    def record(self, memory: JobMemory) -> None:
        """Hand the present facts to the storage, for the next checkpoint that is committed."""
        ledger = memory.ledger
        self._durable.record(SKIPPED_FROM, ledger.skipped.first)
        self._durable.record(LOSS_SCALE, ledger.loss_scales.text or None)
        log = ledger.evaluation_log
        if log.losses == self._recorded:
            return
        self._recorded = dict(log.losses)
        self._durable.cleaner.losses = self._recorded
        storage = self._durable.storage
        self._durable.work_pool.submit(store_evaluations, storage, log.document)
