"""The manifests have no unknown field and no wrong value, by the schemas of Kubernetes and of custom resources.

Those of the custom resources are read from the folder that the variable CRD_FOLDER names (CONTRIBUTING.md).
"""

import copy
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.custom_resources import errors, schemas

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
CHART = DEPLOY / "helm" / "tessera"
BUILT_IN = {"v1", "apps/v1", "policy/v1", "networking.k8s.io/v1", "autoscaling/v2"}
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
BUILDS = {
    **{name: ["kubectl", "kustomize", KUBERNETES / "overlays" / name] for name in OVERLAYS},
    "chart": ["helm", "template", "tessera", CHART],
    "chart for GPUs": ["helm", "template", "tessera", CHART, f"-f{CHART / 'values-gpu.yaml'}"],
}
FOLDER = os.environ.get("CRD_FOLDER")
VALIDATE = shutil.which("kubernetes-validate")
needs_validate = pytest.mark.skipif(
    VALIDATE is None, reason="kubernetes-validate is not installed (PyPI)"
)
needs_definitions = pytest.mark.skipif(
    FOLDER is None, reason="CRD_FOLDER names no folder of custom resource definitions"
)


def run(command, **options):
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, **options
    )


def build(name):
    """Build an overlay or the chart; returns YAML."""
    command = BUILDS[name]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = run(command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def validate(text, tmp_path):
    file = tmp_path / "built.yaml"
    file.write_text(text)
    return run([VALIDATE, "--strict", file])


def custom_resources():
    """Return the objects of other projects in all manifests, by kind."""
    files = [it for it in KUBERNETES.rglob("*.yaml") if it.name != "kustomization.yaml"]
    objects = [it for file in files for it in yaml.safe_load_all(file.read_text())]
    return {it["kind"]: it for it in objects if it["apiVersion"] not in BUILT_IN}


RESOURCES = custom_resources()
# A value that the definition refuses, for each kind.
WRONG = {
    "HTTPRoute": (("spec", "rules", 0, "timeouts", "request"), "600"),
    "InferencePool": (("spec", "targetPorts", 0, "number"), 70000),
    "PodMonitor": (("spec", "podMetricsEndpoints", 0, "interval"), "15 s"),
    "ScaledObject": (("spec", "minReplicaCount"), "1"),
    "ServingRuntime": (("spec", "containers", 0, "ports", 0, "containerPort"), "8080"),
}


def changed(resource, path, value):
    """Return a copy of a resource with another value at a path."""
    resource = copy.deepcopy(resource)
    inner = resource
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return resource


@pytest.mark.slow
@needs_validate
@pytest.mark.parametrize("name", BUILDS)
def test_kubernetes_accepts_all_fields(name, tmp_path):
    text = build(name)
    done = validate(text, tmp_path)

    lines = (done.stderr + "\n" + done.stdout).splitlines()
    unknown = {
        line.split("for kind ")[1].split()[0] for line in lines if "Couldn't find schema" in line
    }
    kinds = {it["kind"] for it in yaml.safe_load_all(text)}
    assert done.returncode == 0, done.stdout + done.stderr
    assert unknown == kinds & RESOURCES.keys()


@pytest.mark.slow
@needs_validate
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("livenessProbe:", "livenesProbe:"), ("containerPort: 8000", "containerPort: http")],
)
def test_a_misspelled_field_or_a_value_of_another_type_is_refused(name, right, wrong, tmp_path):
    text = build(name)
    assert right in text

    assert validate(text.replace(right, wrong), tmp_path).returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OVERLAYS)
def test_kustomize_refuses_an_overlay_with_an_unknown_field(name, tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    file = tmp_path / "kubernetes" / "overlays" / name / "kustomization.yaml"
    file.write_text(file.read_text() + "resource: []\n")

    done = run(["kubectl", "kustomize", file.parent])

    assert done.returncode != 0
    assert "unknown field" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
@pytest.mark.parametrize(
    ("arguments", "status"),
    [([], 0), ([f"-f{CHART / 'values-gpu.yaml'}"], 0), (["--set=replicas=many"], 1)],
    ids=["cpu", "gpu", "wrong value"],
)
def test_helm_finds_nothing_in_the_chart_but_wrong_values(arguments, status):
    assert run(["helm", "lint", "--strict", CHART, *arguments]).returncode == status


def test_each_kind_of_custom_resource_has_a_wrong_value():
    assert RESOURCES.keys() == WRONG.keys()


@needs_definitions
@pytest.mark.parametrize("kind", sorted(RESOURCES))
def test_a_custom_resource_conforms_to_its_definition(kind):
    resource = RESOURCES[kind]
    schema = schemas(Path(FOLDER))[resource["apiVersion"], kind]

    assert errors(resource, schema) == []


@needs_definitions
@pytest.mark.parametrize("kind", sorted(RESOURCES))
def test_a_definition_refuses_an_unknown_field_and_a_wrong_value(kind):
    resource = RESOURCES[kind]
    schema = schemas(Path(FOLDER))[resource["apiVersion"], kind]
    path, value = WRONG[kind]

    (unknown,) = errors(changed(resource, ("spec", "selectors"), {}), schema)
    (wrong,) = errors(changed(resource, path, value), schema)

    assert "'selectors' was unexpected" in unknown
    assert str(path[-1]) in wrong


# The reading of definitions, on one of our own.

DEFINITION = """
kind: CustomResourceDefinition
spec:
  group: example.com
  names: {kind: Example}
  versions:
    - name: v1
      schema:
        openAPIV3Schema:
          type: object
          required: [spec]
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec:
              type: object
              required: [port, mode]
              properties:
                mode: {type: string, default: fast}
                port: {anyOf: [{type: integer}, {type: string}], x-kubernetes-int-or-string: true}
                label: {type: string, nullable: true}
                labels: {type: object, additionalProperties: {type: string}}
                free: {type: object, x-kubernetes-preserve-unknown-fields: true}
                ports:
                  type: array
                  x-kubernetes-list-type: map
                  x-kubernetes-list-map-keys: [name]
                  items: {type: object, properties: {name: {type: string}}}
"""


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"port": 1}, []),
        ({"port": "http", "label": None, "labels": {"a": "b"}, "free": {"x": 1}}, []),
        ({}, ["$.spec: 'port' is a required property"]),
        ({"port": 1, "prot": 1}, ["$.spec: Additional properties are not allowed ('prot' was unexpected)"]),
        ({"port": 1, "labels": {"a": 1}}, ["$.spec.labels.a: 1 is not of type 'string'"]),
        ({"port": 1, "ports": [{"name": "a"}, {"name": "b"}]}, []),
        ({"port": 1, "ports": [{"name": "a"}, {"name": "a"}]}, ["$.spec.ports: ('a',) is repeated"]),
    ],
)  # fmt: skip
def test_a_resource_is_compared_with_the_fields_of_its_definition(spec, expected, tmp_path):
    (tmp_path / "example.yaml").write_text(DEFINITION)
    resource = {
        "apiVersion": "example.com/v1", "kind": "Example", "metadata": {"name": "x"}, "spec": spec
    }  # fmt: skip

    schema = schemas(tmp_path)["example.com/v1", "Example"]

    assert errors(resource, schema) == expected
