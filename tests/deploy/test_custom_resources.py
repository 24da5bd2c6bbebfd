"""The custom resources of the manifests have the form that their operators define.

CRD_FOLDER names a folder with the definitions (YAML files, kind CustomResourceDefinition) of Prometheus' operator,
KEDA, the Gateway API, its inference extension and KServe; without it, only the validation itself is tested.
"""

import copy
import functools
import os
from pathlib import Path

import pytest
import yaml

from tests.deploy.custom_resources import BUILT_IN, error_of, strict, validators

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
CRDS = os.environ.get("CRD_FOLDER")
needs_definitions = pytest.mark.skipif(
    CRDS is None, reason="CRD_FOLDER names no folder with definitions of custom resources"
)
# For each kind: places and values that its definition must refuse, an unknown field and a wrong value.
WRONG = {
    "PodMonitor": [("spec.podMetricsEndpoints.0.intervall", "15s"), ("spec.podMetricsEndpoints.0.interval", "15 s")],
    "ScaledObject": [("spec.minReplicas", 1), ("spec.pollingInterval", "often")],
    "InferencePool": [("spec.endpointPickerRef.portNumber", 9002), ("spec.targetPorts.0.number", 80_000)],
    "HTTPRoute": [("spec.rules.0.timeouts.read", "600s"), ("spec.rules.0.matches.0.path.type", "Prefix")],
    "ServingRuntime": [("spec.container", {}), ("spec.containers.0.ports.0.containerPort", "http")],
}  # fmt: skip


def custom_resources():
    """Return the objects of the manifests that are not Kubernetes' own."""
    files = sorted(FOLDER.rglob("*.yaml"))
    objects = [it for file in files for it in yaml.safe_load_all(file.read_text())]
    return {it["kind"]: it for it in objects if it["apiVersion"].rpartition("/")[0] not in BUILT_IN}


OBJECTS = custom_resources()


def changed(instance, place, value):
    """Return a copy of an object with another value at a place."""
    instance = copy.deepcopy(instance)
    *path, last = [int(step) if step.isdigit() else step for step in place.split(".")]
    functools.reduce(lambda found, step: found[step], path, instance)[last] = value
    return instance


@functools.cache
def definitions():
    return validators(Path(CRDS))


def check(instance):
    return error_of(definitions()[instance["apiVersion"], instance["kind"]], instance)


def test_every_custom_resource_has_cases_that_must_be_refused():
    assert OBJECTS.keys() == WRONG.keys()


@needs_definitions
@pytest.mark.parametrize("kind", OBJECTS)
def test_a_custom_resource_has_the_form_of_its_definition(kind):
    assert check(OBJECTS[kind]) is None


@needs_definitions
@pytest.mark.parametrize(
    ("kind", "place", "value"), [(kind, *case) for kind, cases in WRONG.items() for case in cases]
)
def test_a_wrong_field_or_value_of_a_custom_resource_is_refused(kind, place, value):
    assert check(changed(OBJECTS[kind], place, value)) is not None


SCHEMA = {
    "type": "object",
    "required": ["port"],
    "properties": {
        "port": {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "list": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        "none": {"type": "string", "nullable": True},
    },
}  # fmt: skip
DEFINITION = {
    "spec": {
        "group": "example.com",
        "names": {"kind": "Example"},
        "versions": [
            {"name": "v1", "served": True, "schema": {"openAPIV3Schema": SCHEMA}},
            {"name": "v0", "served": False},
        ],
    }
}


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crds")
    (folder / "example.yaml").write_text(yaml.safe_dump(DEFINITION))
    (found,) = validators(folder).items()
    assert found[0] == ("example.com/v1", "Example")
    return found[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 1},
        {"port": "http", "labels": {"any": "x"}},
        {"port": 1, "free": {"any": {"thing": 1}}, "none": None},
        {"port": 1, "list": [{"a": 1}, {}]},
    ],
)
def test_what_a_definition_admits_is_accepted(example, fields):
    instance = {"apiVersion": "example.com/v1", "kind": "Example", "metadata": {"name": "x"}}

    assert error_of(example, instance | fields) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "'port' is a required property"),
        ({"port": 1.5}, "1.5 is not valid"),
        ({"port": 1, "labels": {"any": 1}}, "$.labels.any: 1 is not of type 'string'"),
        ({"port": 1, "prot": 2}, "('prot' was unexpected)"),
        ({"port": 1, "list": [{"b": 1}]}, "$.list[0]: Additional properties"),
    ],
)
def test_what_a_definition_does_not_admit_is_refused(example, fields, message):
    assert message in error_of(example, fields)


def test_a_schema_is_not_changed():
    before = copy.deepcopy(SCHEMA)

    strict(SCHEMA)

    assert before == SCHEMA
