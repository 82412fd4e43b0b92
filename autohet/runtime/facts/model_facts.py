"""Facts of a job's model for planning: its spec, its graph, and why it cannot be trained.

Transformers' own modules are the one description of a model; all of it is read from them. What was
read is kept in `autohet.runtime.facts.fact_store`, so that a second plan imports neither torch nor
transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from autohet.runtime.facts.fact_store import recall
from autohet.runtime.job import Job
from planner.errors import ConfigError, InfeasibleError
from planner.plans.model_spec import ModelSpec
from planner.spmd.graph import Decoder, Graph, GraphNode

T = TypeVar("T")


def planned_spec(job: Job) -> ModelSpec:
    """Return the spec of a job's model, without its adapter.

    Raises:
        ConfigError: transformers builds no decoder from the job's config, or reads none.
    """
    facts: dict[str, Any] = {
        "precision": job.training.precision,
        "dropout": job.model.dropout and job.training.preference_beta is None,
    }
    spec = _recall_or_derive(job, ModelSpec, facts, lambda: derive_spec(job))
    return replace(spec, name=job.name)


def with_adapter(spec: ModelSpec, job: Job) -> ModelSpec:
    """Return the spec with the job's adapter and all other weights frozen; no-op without one."""
    if job.model.adapter is None:
        return spec
    facts = {
        "adapted": repr(spec),
        "precision": job.training.precision,
        "sequence_length": job.training.sequence_length,
    }
    adapted = _recall_or_derive(job, ModelSpec, facts, lambda: _derive_adapted(spec, job))
    if job.model.keeps_reference(job.training.objective):
        adapted = adapted.with_frozen_copies()
    # DPO's reference has a forward pass of its own.
    if job.training.objective == "dpo":
        return adapted.with_forward_passes(2)
    return adapted


def with_muon(spec: ModelSpec, job: Job) -> ModelSpec:
    """Return the spec with the matrices that Muon updates; no-op for another optimizer."""
    if job.training.optimizer != "muon":
        return spec
    facts = {"optimized": repr(spec), "exempt": job.training.muon_exempt}
    return _recall_or_derive(job, ModelSpec, facts, lambda: _derive_matrices(spec, job))


def training_refusal(job: Job) -> str | None:
    """Return the reason why `autohet train` cannot run a job's model; None: it can."""
    facts = {"spmd": job.parallelism.spmd, "objective": job.training.objective}
    known = _recall_or_derive(job, _Refusal, facts, lambda: _Refusal(_derive_refusal(job)))
    return known.reason


def decoder(job: Job, microbatch: int) -> Decoder:
    """Return the graph of a job's model for a microbatch.

    Raises:
        InfeasibleError: the model has no SPMD program, such as one of a family whose programs are
        not tested, or one with an adapter or a padded vocabulary.
    """
    facts = {
        "precision": job.training.precision,
        "sequence_length": job.training.sequence_length,
        "microbatch": microbatch,
    }
    known = _recall_or_derive(job, _DecoderDocument, facts, lambda: _derive_graph(job, microbatch))
    if known.reason is not None:
        raise InfeasibleError(
            f"model '{job.name}' has no SPMD program: {known.reason}. Use a strategy with pipelines"
            " (autohet, metis, fasop)"
        )
    graph = Graph(known.nodes, known.notes, known.most_units)
    return Decoder(graph, known.split_dims)


@dataclass(frozen=True)
class _Refusal:
    reason: str | None


@dataclass(frozen=True)
class _DecoderDocument:
    """Parts of a Decoder, or the reason why there is none."""

    reason: str | None = None
    nodes: tuple[GraphNode, ...] = ()
    notes: tuple[str, ...] = ()
    most_units: int = 0
    split_dims: dict[str, int] = field(default_factory=dict)


def _recall_or_derive(
    job: Job, kind: type[T], facts: Mapping[str, Any], derive: Callable[[], T]
) -> T:
    """Return a value that depends on a job's model and these facts of the job.

    It is derived anew if what the model depends on cannot be read here: for a family in the job's
    own code, and for a hub id.
    """
    model = asdict(job.model)
    if job.model.family not in (None, "auto"):
        return derive()
    if job.model.pretrained is not None:
        files = _files(Path(job.model.pretrained))
        if files is None:
            return derive()
        model["files"] = files
    if job.model.adapter is not None and job.model.adapter.from_ is not None:
        return derive()
    return recall(kind, {"model": model, **facts}, derive)


def _files(directory: Path) -> list[tuple[str, int, int]] | None:
    """Return name, bytes and time of each file of a checkpoint; None: it is no directory."""
    found = []
    try:
        for path in directory.iterdir():
            state = path.stat()
            found.append((path.name, state.st_size, state.st_mtime_ns))
    except OSError:
        return None
    return sorted(found)


# What follows imports torch and transformers: three seconds.


def derive_spec(job: Job) -> ModelSpec:
    """Derive the model's spec from its configuration, without the store."""
    from autohet.runtime.models.config import use_family
    from autohet.runtime.models.specs.model_spec import model_spec_from_config

    use_family(job.model)
    model = job.model
    training = job.training
    source = model.config if model.config is not None else model.pretrained
    if source is None:
        raise ConfigError("model needs config or pretrained")
    return model_spec_from_config(
        job.name,
        source,
        precision=training.precision,
        revision=model.revision,
        rows=(model.vocabulary_size, model.vocabulary_multiple),
        dropout=model.dropout and training.preference_beta is None,
    )


def _derive_adapted(spec: ModelSpec, job: Job) -> ModelSpec:
    from autohet.runtime.models.config import load_config
    from autohet.runtime.models.specs.adapter_spec import adapt_spec

    training = job.training
    config = load_config(job.model)
    return adapt_spec(spec, config, training.sequence_length, training.precision)


def _derive_matrices(spec: ModelSpec, job: Job) -> ModelSpec:
    from autohet.runtime.models.config import load_config
    from autohet.runtime.models.specs.matrix_spec import with_matrices

    return with_matrices(spec, load_config(job.model, job.training))


def _derive_refusal(job: Job) -> str | None:
    from autohet.runtime.models.config import load_config
    from autohet.runtime.models.proof import require_proof
    from autohet.runtime.models.registry import family_of
    from autohet.runtime.spmd.language_model import check_without_dropout

    try:
        config = load_config(job.model)
        family_of(config).parameter_specs(config)
        if job.parallelism.spmd:
            check_without_dropout(config)
        if job.model.family is not None:
            require_proof(config)
    except ConfigError as error:
        return str(error)
    return None


def _derive_graph(job: Job, microbatch: int) -> _DecoderDocument:
    from autohet.runtime.models.config import load_config
    from autohet.runtime.models.family import COMPUTE_DTYPES
    from autohet.runtime.models.registry import family_of
    from autohet.runtime.spmd.language_model import capture_decoder

    if job.model.adapter is not None:
        return _DecoderDocument("its weights are frozen, and programs train all of them")
    if job.model.vocabulary_multiple > 1:
        return _DecoderDocument("model.vocabulary_multiple pads its vocabulary")
    training = job.training
    dtype = COMPUTE_DTYPES[training.precision]
    try:
        config = load_config(job.model)
        if family_of(config).has_experts:
            return _DecoderDocument("which experts see a token is known only as it is computed")
        found = capture_decoder(config, microbatch, training.sequence_length, dtype)
    except ConfigError as error:
        return _DecoderDocument(str(error))
    graph = found.graph
    dims = dict(found.split_dims)
    return _DecoderDocument(None, graph.nodes, graph.notes, graph.most_units, dims)
