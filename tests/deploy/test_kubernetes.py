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
from tests.deploy.custom_resources import BUILT_IN
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


DEPLOYMENT = yaml.safe_load((FOLDER / "base" / "deployment.yaml").read_text())


def needs(command):
    return pytest.mark.skipif(shutil.which(command) is None, reason=f"{command} is not installed")


needs_helm, needs_kubectl = needs("helm"), needs("kubectl")
needs_validator = needs("kubernetes-validate")
POD = DEPLOYMENT["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_resources_exist_and_settings_are_the_services(folder):
    assert all((folder / resource).exists() for resource in read(folder)["resources"])
    assert settings(folder).keys() <= SETTINGS


def test_the_grace_period_is_longer_than_the_sleep_and_draining():
    given = settings(FOLDER / "base")
    sleep = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    draining = int(given["TESSERA_DRAIN_DELAY"]) + int(given["TESSERA_DRAIN_TIMEOUT"])

    assert sleep == 15
    assert POD["terminationGracePeriodSeconds"] > sleep + draining + 10


def test_probes_ask_health_routes_on_the_services_port():
    probes = [CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]

    assert {probe["path"] for probe in probes} <= HEALTH_PATHS
    assert {probe["path"] for probe in probes} <= ROUTES.keys()
    assert {probe["port"] for probe in probes} == {CONTAINER["ports"][0]["name"]}


def test_probes_give_a_start_ten_minutes_and_notice_an_end_within_seconds():
    startup, readiness, liveness = (
        CONTAINER[f"{name}Probe"] for name in ("startup", "readiness", "liveness")
    )

    assert (startup["periodSeconds"], startup["failureThreshold"]) == (1, 600)
    assert readiness["periodSeconds"] == 1
    assert (liveness["httpGet"]["path"], liveness["periodSeconds"]) == ("/health/live", 5)


def test_the_autoscaler_and_the_alerts_select_the_job_of_the_monitor():
    keda = FOLDER / "overlays" / "keda"
    monitor = yaml.safe_load((keda / "pod-monitor.yaml").read_text())["spec"]
    scaled = yaml.safe_load((keda / "scaled-object.yaml").read_text())["spec"]
    job = read(FOLDER / "base")["labels"][0]["pairs"][monitor["jobLabel"]]

    (trigger,) = scaled["triggers"]
    assert selectors(trigger["metadata"]["query"]) == [
        ("vllm:num_requests_waiting", [("job", job)])
    ]
    (down,) = (rule for rule in rules("alerts.yml") if rule["alert"] == "TesseraDown")
    assert selectors(down["expr"]) == [("up", [("job", job)])]


def test_pods_that_endpoint_pickers_choose_have_their_label():
    (labels,) = read(FOLDER / "overlays" / "gpu")["labels"]

    assert labels["pairs"] == {"llm-d.ai/engine-type": "vllm"}
    assert labels["includeTemplates"]


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
@needs_kubectl
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


CHART = FOLDER.parent / "helm" / "tessera"
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
    assert values["preStopSeconds"] == CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]


@pytest.mark.slow
@needs_helm
@needs_kubectl
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


def run(*command, text=None):
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.slow
@needs_helm
@pytest.mark.parametrize("values", VALUES)
def test_helm_finds_nothing_wrong_with_the_chart(values):
    done = run("helm", "lint", CHART, "--strict", *VALUES[values])

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@needs_helm
@pytest.mark.parametrize("command", [("template", "tessera"), ("lint",)], ids=lambda it: it[0])
@pytest.mark.parametrize("wrong", ["replica=3", "settings.MODEL=x", "replicas=many"])
def test_the_chart_refuses_wrong_values(command, wrong):
    done = run("helm", *command, CHART, "--set", wrong)

    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stdout + done.stderr


BUILT = {
    **{
        f"overlay {name}": ("kubectl", "kustomize", FOLDER / "overlays" / name) for name in OVERLAYS
    },
    **{f"chart {name}": ("helm", "template", "tessera", CHART, *it) for name, it in VALUES.items()},
}


@pytest.fixture(scope="module", params=BUILT)
def built(request):
    """The objects of an overlay or of the chart that Kubernetes itself defines."""
    if shutil.which(BUILT[request.param][0]) is None:
        pytest.skip(f"{BUILT[request.param][0]} is not installed")
    done = run(*BUILT[request.param])
    assert done.returncode == 0, done.stderr
    objects = yaml.safe_load_all(done.stdout)
    return [it for it in objects if it["apiVersion"].rpartition("/")[0] in BUILT_IN]


def validate(objects, folder):
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    return run("kubernetes-validate", "--strict", file)


@pytest.mark.slow
@needs_validator
def test_what_is_built_has_the_form_that_kubernetes_defines(built, tmp_path):
    done = validate(built, tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@needs_validator
@pytest.mark.parametrize(
    ("field", "value"), [("replica", 2), ("replicas", "two"), ("template", {"spec": {}})]
)
def test_a_wrong_field_or_value_of_what_is_built_is_refused(built, tmp_path, field, value):
    (deployment,) = (it for it in built if it["kind"] == "Deployment")
    wrong = deployment | {"spec": deployment["spec"] | {field: value}}

    assert validate([wrong], tmp_path).returncode != 0


@pytest.mark.slow
@needs_validator
def test_a_wrong_field_of_the_autoscaler_is_refused(tmp_path):
    autoscaler = yaml.safe_load((FOLDER / "overlays" / "hpa" / "autoscaler.yaml").read_text())
    autoscaler["spec"]["minReplica"] = autoscaler["spec"].pop("minReplicas")

    assert validate([autoscaler], tmp_path).returncode != 0


@pytest.mark.slow
@needs_kubectl
def test_kubectl_refuses_a_patch_of_what_does_not_exist(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "overlays" / "keda"
    (overlay / "kustomization.yaml").write_text(
        (overlay / "kustomization.yaml").read_text().replace("/spec/replicas", "/spec/replica")
    )

    assert run("kubectl", "kustomize", overlay).returncode != 0
