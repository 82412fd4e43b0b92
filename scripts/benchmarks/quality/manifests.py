"""Validate the shipped Kubernetes files and those of the guide against real schemas, strictly: a
field that a schema does not name is an error, as for `kubectl apply --validate=strict`.

    python -m scripts.benchmarks.quality.manifests CRD.yaml ...

CRD.yaml: KubeRay's and Karpenter's custom resource definitions, from checkouts of
ray-project/kuberay (ray-operator/config/crd/bases), kubernetes-sigs/karpenter and
aws/karpenter-provider-aws (pkg/apis/crds). Kubernetes' own kinds need `kubernetes-validate` (PyPI),
in an environment with it, jsonschema and PyYAML. Rules in CEL are not evaluated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[3]
RELEASE = "1.33"
"""Release of Kubernetes whose schemas are used."""


def main() -> int:
    schemas = {key: schema for path in sys.argv[1:] for key, schema in read_definitions(path)}
    num_wrong = 0
    for name, document in shipped():
        kind = (str(document["apiVersion"]), str(document["kind"]))
        wrong = errors_of(document, schemas.get(kind))
        print(f"{name}: {' '.join(kind)}: {'; '.join(wrong) or 'valid'}")
        num_wrong += bool(wrong)
    return int(num_wrong > 0)


def shipped() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each whole document, with the name of its file."""
    for path in sorted((ROOT / "cluster_configs").glob("kuberay-*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document
    guide = ROOT / "docs" / "guides" / "kubernetes.md"
    for block in re.findall(r"```yaml\n(.*?)```", guide.read_text(), re.DOTALL):
        document = yaml.safe_load(block)
        if "kind" in document:
            yield guide.name, document


def read_definitions(path: str) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    for document in yaml.safe_load_all(Path(path).read_text()):
        if not document or document.get("kind") != "CustomResourceDefinition":
            continue
        spec = document["spec"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            schema["properties"]["metadata"] = {"type": "object"}
            make_strict(schema)
            yield (f"{spec['group']}/{version['name']}", spec["names"]["kind"]), schema


def make_strict(schema: object) -> None:
    """Turn Kubernetes' dialect into JSON Schema's, and refuse fields that are not named."""
    if isinstance(schema, list):
        for item in schema:
            make_strict(item)
    if not isinstance(schema, dict):
        return
    keeps_others = schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "properties" in schema and not keeps_others:
        schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    for item in schema.values():
        make_strict(item)


def errors_of(document: dict[str, Any], schema: dict[str, Any] | None) -> list[str]:
    """Return what is wrong with a document; pods in it are Kubernetes' own."""
    if schema is None:
        return kubernetes_errors(document)
    found = []
    for error in jsonschema.Draft7Validator(schema).iter_errors(document):
        found.append(f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}")
    for pod in pods_in(document):
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
        found += kubernetes_errors(whole)
    return found


def pods_in(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for item in value.values():
            yield from pods_in(item)
    if isinstance(value, list):
        for item in value:
            yield from pods_in(item)


def kubernetes_errors(document: dict[str, Any]) -> list[str]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, RELEASE, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error)[:300]]
    return []


if __name__ == "__main__":
    raise SystemExit(main())
