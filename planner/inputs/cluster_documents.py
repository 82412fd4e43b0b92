"""Cluster files of several tools, converted to one form: Ray's cluster-launcher document.

KubeRay's are derived and legacy files are rewritten as Ray does. Each other kind of file raises an
error of its own.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.errors import ConfigError
from planner.inputs.documents import Json, read_mapping, read_section, read_sections, read_text
from planner.inputs.kuberay import DERIVED, as_launcher_document, is_kuberay
from planner.inputs.machines import device_name

LABEL_PREFIX = "autohet.io/"
LEGACY_HEAD = "ray-legacy-head-node-type"
LEGACY_WORKER = "ray-legacy-worker-node-type"
TOP_KEYS = frozenset(
    {
        "cluster_name",
        "max_workers",
        "upscaling_speed",
        "idle_timeout_minutes",
        "docker",
        "provider",
        "auth",
        "available_node_types",
        "head_node_type",
        "file_mounts",
        "cluster_synced_files",
        "file_mounts_sync_continuously",
        "rsync_exclude",
        "rsync_filter",
        "initialization_commands",
        "setup_commands",
        "head_setup_commands",
        "worker_setup_commands",
        "head_start_ray_commands",
        "worker_start_ray_commands",
        "no_restart",
        "min_workers",
        "initial_workers",
        "autoscaling_mode",
        "target_utilization_fraction",
        "head_node",
        "worker_nodes",
        "metadata",
        "notes",
    }
)
"""Ray's own (`ray/autoscaler/ray-schema.json`), and `notes`, which a derived document has."""
NODE_TYPE_KEYS = frozenset(
    {
        "resources",
        "labels",
        "node_config",
        "min_workers",
        "max_workers",
        "docker",
        "worker_setup_commands",
        "worker_image",
        "pod_config",
        "object_store_memory",
        "idle_timeout_s",
        "priority",
        "initialization_commands",
    }
)
DOCKER_KEYS = frozenset({"pull_before_run", "worker_image", "worker_run_options"})
"""Keys of a node type's own `docker`; the file's has more."""
_HELM_KEYS = frozenset({"head", "worker", "additionalWorkerGroups"})
_ANYSCALE_KEYS = frozenset(
    {"cloud", "cloud_id", "compute_config", "worker_node_types", "image_uri", "build_id"}
)
_SKY_RESOURCES = frozenset(
    {"accelerators", "any_of", "cloud", "infra", "instance_type", "ordered", "use_spot"}
)


def read_cluster_yaml(path: str | Path) -> object:
    """Return the content of a cluster file, unchecked.

    KubeRay's documents are converted to a cluster-launcher document.

    Raises:
        ConfigError: the file cannot be read.
    """
    import yaml

    text = read_text(path, "cluster")
    _refuse_scripts(text, f"cluster '{path}'")
    try:
        documents = [found for found in yaml.safe_load_all(text) if found is not None]
    except yaml.YAMLError as error:
        if re.search(r"{{.*}}|{%.*%}|%{|\${", text):
            raise ConfigError(
                f"cluster '{path}' is a template; render it first (`helm template`, `envsubst`)"
            ) from None
        raise ConfigError(f"cluster '{path}' is not YAML: {error}") from None
    return cluster_document(documents, f"cluster '{path}'")


def cluster_document(documents: list[object], where: str) -> object:
    """Return the one document that describes a cluster, KubeRay's as a launcher's."""
    document = _the_cluster(documents, where)
    if not is_kuberay(document):
        return document
    flat = [item for each in documents for item in _items(each)]
    beside = [item for item in flat if isinstance(item, Mapping)]
    return as_launcher_document(document, where, beside)


def _refuse_scripts(text: str, where: str) -> None:
    if re.search(r"^#SBATCH\b", text, re.MULTILINE):
        raise ConfigError(
            f"{where} is a Slurm script, which `sbatch` reads. In its allocation `autohet train`"
            " needs no cluster file; to plan, give a Ray cluster file with these machines as node"
            " types"
        )
    if text.startswith("#!"):
        raise ConfigError(
            f"{where} is a script ({text.splitlines()[0]}), no cluster file; give a Ray"
            " cluster-launcher file or a RayCluster"
        )


def _the_cluster(documents: list[object], where: str) -> object:
    """Return the one document that describes a cluster.

    Files for kubectl also hold services, accounts and volumes.
    """
    flat = list[object]()
    for document in documents:
        flat += _items(document)
        if isinstance(document, Mapping) and _is_sky_task(document):
            raise ConfigError(
                f"{where} is a SkyPilot task, which `sky launch` reads; give a Ray cluster file,"
                " from whose node types `autohet sky` writes such tasks"
            )
    if len(flat) <= 1:
        return flat[0] if flat else None
    clusters = [document for document in flat if is_kuberay(document) and _brings(document)]
    if len(clusters) == 1:
        return clusters[0]
    if not clusters:
        kinds = [str(item.get("kind")) for item in flat if isinstance(item, Mapping)]
        raise ConfigError(
            f"{where} holds {len(flat)} documents ({', '.join(kinds)}), none of which is a"
            " RayCluster with a headGroupSpec or brings one"
        )
    names = []
    for cluster in clusters:
        metadata = read_section(cluster, "metadata")
        names.append(f"{cluster['kind']} {metadata.get('name')}")
    raise ConfigError(
        f"{where} holds {len(clusters)} clusters ({', '.join(names)}); give a file with one"
    )


def _is_sky_task(document: Json) -> bool:
    """Return True for SkyPilot's keys (docs.skypilot.co, "Task YAML"), which Ray's files lack."""
    if {"apiVersion", "provider", "available_node_types"} & set(document):
        return False
    resources = document.get("resources")
    asks = isinstance(resources, Mapping) and bool(_SKY_RESOURCES & set(resources))
    return asks or "num_nodes" in document or {"run", "setup"} <= set(document)


def _items(document: object) -> Iterator[object]:
    """Yield the items of a Kubernetes `List` or of a CodeFlare AppWrapper, or the document."""
    given = document if isinstance(document, Mapping) else {}
    if given.get("kind") == "List":
        yield from given.get("items") or ()
    elif given.get("kind") == "AppWrapper":
        for part in read_sections(read_section(given, "spec"), "components"):
            yield part.get("template")
    else:
        yield document


def _brings(document: Json) -> bool:
    """Return True if a KubeRay document describes a cluster; a RayJob may only select one."""
    spec = read_section(document, "spec")
    spec = spec.get("jobTemplate") or spec
    return bool({"headGroupSpec", "rayClusterSpec", "rayClusterConfig"} & set(spec))


def refuse_other_documents(top: Json, where: str) -> None:
    """ConfigError for files of other tools that name clusters, too."""
    if "available_node_types" in top:
        return
    if _HELM_KEYS & set(top):
        raise ConfigError(
            f"{where} holds values of KubeRay's Helm chart; render the cluster with `helm template"
            " kuberay/ray-cluster -f FILE` and give that"
        )
    if _ANYSCALE_KEYS & set(top) or "instance_type" in read_section(top, "head_node"):
        raise ConfigError(
            f"{where} is an Anyscale compute config; `ray up` does not read it. Give a Ray"
            " cluster-launcher file with available_node_types"
        )
    if provider_type(top) == "vsphere":
        raise ConfigError(
            f"{where} is Ray's file for vSphere without node types; add available_node_types with"
            " GPU under resources and labels of what its machines have"
        )
    if provider_type(top) == "local":
        raise ConfigError(
            f"{where} lists machines (provider local) and not what they have; name node types under"
            " available_node_types with GPU and labels, and plan on those"
        )
    if "apiVersion" in top and "kind" in top:
        raise ConfigError(
            f"{where} is a {top['kind']} of {top['apiVersion']}; KubeRay's RayCluster"
            " (ray.io/v1) was expected"
        )
    if not TOP_KEYS & set(top):
        raise ConfigError(
            f"{where} has no key of a Ray cluster file, but {', '.join(sorted(top)[:4])}; give one"
            " with cluster_name, provider and available_node_types"
        )


def with_legacy_types(top: Json) -> Json:
    """Rewrite a file of `head_node` or `worker_nodes` as Ray does.

    See merge_legacy_yaml_with_defaults in `ray/autoscaler/_private/util.py`. A part that is missing
    is a machine without GPUs there.
    """
    head = read_section(top, "head_node")
    workers = read_section(top, "worker_nodes")
    if "available_node_types" in top or not (head or workers):
        return top
    types: dict[str, dict[str, Any]] = {
        LEGACY_HEAD: {"min_workers": 0, "max_workers": 0},
        LEGACY_WORKER: {"min_workers": 0},
    }
    if workers:
        types[LEGACY_WORKER] = {
            "min_workers": top.get("min_workers", 0),
            "max_workers": top.get("max_workers", 2),
        }
    for name, config in ((LEGACY_HEAD, head), (LEGACY_WORKER, workers)):
        given = dict(config or {"resources": {"CPU": 2}})
        types[name]["resources"] = given.pop("resources", None) or {}
        types[name]["node_config"] = given
    return {**top, "available_node_types": types, "head_node_type": LEGACY_HEAD}


def default_head(top: Json, types: Json) -> str | None:
    """Return the head's type in Ray's own defaults, if the file has such a type; else None."""
    name = "ray_head_default" if provider_type(top) == "gcp" else "ray.head.default"
    return name if name in types else None


def provider_type(top: Json) -> object:
    """Return the `type` of a file's provider; None if it names none."""
    provider = read_section(top, "provider")
    return provider.get("type")


def instance_type_of(config: Json) -> str | None:
    """The machine that a node is: EC2's InstanceType, GCP's machineType, Azure's vmSize."""
    azure = read_section(config, "azure_arm_parameters")
    named = config.get("InstanceType") or config.get("machineType") or azure.get("vmSize")
    if not named:
        return None
    # GCP also writes a type as a URL: zones/us-central1-a/machineTypes/a2-highgpu-1g
    return str(named).rsplit("/", 1)[-1]


def accelerator_count(config: Json) -> int | None:
    """Return the GPUs that a GCP node adds to its machine type; None if it names none."""
    counts = [
        int(item.get("acceleratorCount", 0)) for item in read_sections(config, "guestAccelerators")
    ]
    return sum(counts) if counts else None


def derived_labels(config: Json, top: Json) -> dict[str, str]:
    """Market, zone and GPU type as the launcher's own keys say them; a file's labels override."""
    found = dict(read_section(config, DERIVED))
    if _is_spot(config):
        found[LABEL_PREFIX + "spot"] = "true"
    zones = named_zones(config, top)
    if len(zones) == 1:
        # several say only where the node may be
        found[LABEL_PREFIX + "zone"] = min(zones)
    for item in read_sections(config, "guestAccelerators"):
        name = str(item.get("acceleratorType", "")).rsplit("/", 1)[-1]
        found[LABEL_PREFIX + "gpu-type"] = device_name(name)
    return found


def named_zones(config: Json, top: Json) -> frozenset[str]:
    """Return the zones that a node type or its file names; Ray takes several between commas."""
    placement = read_section(config, "Placement")
    provider = read_section(top, "provider")
    named = placement.get("AvailabilityZone") or provider.get("availability_zone") or ""
    return frozenset(part.strip() for part in str(named).split(",") if part.strip())


def _is_spot(config: Json) -> bool:
    """Return True if EC2's market options, GCP's scheduling or Azure's priority ask for spot."""
    market = read_section(config, "InstanceMarketOptions")
    if market.get("MarketType") == "spot":
        return True
    scheduling = config.get("scheduling") or {}
    for entry in scheduling if isinstance(scheduling, list) else [scheduling]:
        item = read_mapping(entry, "scheduling")
        if item.get("preemptible") is True or item.get("provisioningModel") == "SPOT":
            return True
    azure = read_section(config, "azure_arm_parameters")
    return str(azure.get("priority", "")).lower() == "spot"
