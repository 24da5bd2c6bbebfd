"""The manifests for Kubernetes agree with the service, and build with kubectl where that is installed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from server.cli.command_settings import read_settings
from server.cli.settings import Settings, environment_variable
from server.http.edge.probes import HEALTH_PATHS
from server.http.metrics.specs import ENGINE_GAUGES
from tests.deploy.monitoring import rules, selectors
from tests.meta.test_routes import ROUTES

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
SETTINGS = {environment_variable(field) for field in Settings.model_fields}
KUSTOMIZATIONS = [FOLDER / "base", *(FOLDER / "overlays" / name for name in OVERLAYS)]


def read(folder):
    return yaml.safe_load((folder / "kustomization.yaml").read_text())


def settings(folder):
    """Return the environment variables that a kustomization and those that it is made of set."""
    found = {}
    for resource in read(folder)["resources"]:
        if (folder / resource).is_dir():
            found |= settings((folder / resource).resolve())
    for generator in read(folder).get("configMapGenerator", ()):
        found |= dict(literal.split("=", 1) for literal in generator["literals"])
    return found


CHART = FOLDER.parent / "helm" / "tessera"
DEPLOYMENT = yaml.safe_load((FOLDER / "base" / "deployment.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_resources_exist_and_settings_are_the_services(folder):
    assert all((folder / resource).exists() for resource in read(folder)["resources"])
    assert settings(folder).keys() <= SETTINGS


def test_the_grace_period_is_longer_than_draining():
    given = settings(FOLDER / "base")
    draining = int(given["TESSERA_DRAIN_DELAY"]) + int(given["TESSERA_DRAIN_TIMEOUT"])

    sleep = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert sleep == 15
    assert POD["terminationGracePeriodSeconds"] == 75
    assert sleep + draining + 10 < 75


def test_the_pods_start_and_end_in_the_time_of_the_probes():
    probes = {
        name: (probe["httpGet"]["path"], probe["periodSeconds"], probe["failureThreshold"])
        for name in ("startup", "readiness", "liveness")
        for probe in [CONTAINER[f"{name}Probe"]]
    }

    assert probes == {
        "startup": ("/health", 1, 600),
        "readiness": ("/health", 1, 3),
        "liveness": ("/health/live", 5, 5),
    }


def test_pods_on_gpus_have_the_label_by_which_endpoint_pickers_read_their_metrics():
    (label,) = read(FOLDER / "overlays" / "gpu")["labels"]
    chart = yaml.safe_load((CHART / "values-gpu.yaml").read_text())

    assert label["pairs"] == chart["podLabels"] == {"llm-d.ai/engine-type": "vllm"}
    assert label["includeTemplates"]
    assert "../gpu" in read(FOLDER / "overlays" / "gateway")["resources"]


def test_keda_and_the_alerts_select_the_job_that_the_pod_monitor_names():
    keda = FOLDER / "overlays" / "keda"
    monitor = yaml.safe_load((keda / "pod-monitor.yaml").read_text())["spec"]
    (trigger,) = yaml.safe_load((keda / "scaled-object.yaml").read_text())["spec"]["triggers"]
    (endpoint,) = monitor["podMetricsEndpoints"]

    job = monitor["selector"]["matchLabels"][monitor["jobLabel"]]
    assert trigger["metadata"]["query"] == f'sum(vllm:num_requests_waiting{{job="{job}"}})'
    selected = [dict(found) for rule in rules("alerts.yml") for _, found in selectors(rule["expr"])]
    assert {labels["job"] for labels in selected if "job" in labels} == {job}
    assert endpoint["port"] == CONTAINER["ports"][0]["name"]
    assert "GET" in ROUTES[endpoint["path"]]


def test_probes_ask_health_routes_on_the_services_port():
    probes = [CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]

    assert {probe["path"] for probe in probes} <= HEALTH_PATHS
    assert {probe["path"] for probe in probes} <= ROUTES.keys()
    assert {probe["port"] for probe in probes} == {CONTAINER["ports"][0]["name"]}


def test_the_root_is_read_only_and_what_the_image_writes_is_mounted():
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert {mount["mountPath"] for mount in CONTAINER["volumeMounts"]} == {"/cache", "/tmp"}  # noqa: S108 - of the pod
    assert POD["enableServiceLinks"] is False


def test_the_autoscaler_reads_a_metric_of_the_service():
    (metric,) = yaml.safe_load((FOLDER / "overlays" / "hpa" / "autoscaler.yaml").read_text())[
        "spec"
    ]["metrics"]

    assert metric["pods"]["metric"]["name"] in {spec.name for spec in ENGINE_GAUGES.values()}


def test_the_runtime_for_kserve_starts_the_service_with_its_flags_and_probes():
    runtime = yaml.safe_load((FOLDER / "kserve" / "serving-runtime.yaml").read_text())
    (container,) = runtime["spec"]["containers"]
    given = read_settings(container["args"])

    assert container["name"] == "kserve-container"
    assert given.port == container["ports"][0]["containerPort"]
    for name in ("startup", "readiness", "liveness"):
        probe, ours = container[f"{name}Probe"], CONTAINER[f"{name}Probe"]
        assert probe["httpGet"] == {"path": ours["httpGet"]["path"], "port": given.port}
        assert probe | {"httpGet": {}} == ours | {"httpGet": {}}
    # KServe ends its pods 30 seconds after SIGTERM.
    assert given.drain_delay + given.drain_timeout + 10 <= 30
    for key in ("securityContext", "volumeMounts"):
        assert container[key] == CONTAINER[key]
    assert runtime["spec"]["volumes"][1:] == POD["volumes"][1:]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_builds_and_selects_its_own_pods(overlay):
    built = subprocess.run(
        ["kubectl", "kustomize", FOLDER / "overlays" / overlay],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    objects = {it["kind"]: it for it in yaml.safe_load_all(built)}

    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
    ]
    assert all(selector and selector.items() <= labels for selector in selectors)
    assert "tessera-settings-" in json.dumps(objects["Deployment"])


VALUES = {"cpu": (), "gpu": (f"--values={CHART / 'values-gpu.yaml'}",)}


def rendered(command):
    built = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return {it["kind"]: it for it in yaml.safe_load_all(built)}


def without_names(pod):
    """Return a pod's specification without the names and labels in which the chart may differ."""
    pod = json.loads(
        json.dumps(pod).replace(pod["containers"][0]["envFrom"][0]["configMapRef"]["name"], "x")
    )
    for constraint in pod["topologySpreadConstraints"]:
        del constraint["labelSelector"]
    return pod


def test_the_chart_has_the_settings_of_the_manifests():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    gpu = yaml.safe_load((CHART / "values-gpu.yaml").read_text())

    assert values["settings"] == settings(FOLDER / "overlays" / "cpu")
    assert values["settings"] | gpu["settings"] == settings(FOLDER / "overlays" / "gpu")
    assert values["terminationGracePeriodSeconds"] == POD["terminationGracePeriodSeconds"]


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("helm") and shutil.which("kubectl")),
    reason="helm or kubectl is not installed",
)
@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_the_chart_makes_the_same_pods_as_the_overlay(overlay):
    ours = rendered(["kubectl", "kustomize", FOLDER / "overlays" / overlay])
    chart = rendered(["helm", "template", "tessera", CHART, *VALUES[overlay]])

    assert ours.keys() == chart.keys()
    pods = [it["Deployment"]["spec"]["template"]["spec"] for it in (ours, chart)]
    assert without_names(pods[0]) == without_names(pods[1])
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for objects in (ours, chart):
            selector = "selector" if kind == "PodDisruptionBudget" else "podSelector"
            assert objects[kind]["spec"].pop(selector)["matchLabels"]
        assert ours[kind]["spec"] == chart[kind]["spec"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
@pytest.mark.parametrize("wrong", ["replica=3", "settings.MODEL=x", "replicas=many"])
def test_the_chart_refuses_wrong_values(wrong):
    done = subprocess.run(
        ["helm", "template", "tessera", CHART, "--set", wrong],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr
