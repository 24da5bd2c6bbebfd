"""The image, the Compose file and the Prometheus configuration are consistent with the code."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from deploy import healthcheck
from kernels.arch import known_processors
from server.cli.bench.engine.options import shapes
from server.cli.front_end import pool as front_end_pool
from server.cli.settings import Settings, environment_variable
from server.engine.link.engine_process import supervisor
from server.http import serving
from tests.meta.test_routes import ROUTES

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
PROMETHEUS = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
SERVICES = COMPOSE["services"]
TARGETS = ["cpu", "gpu"]
RAY = ["ray", "ray-gpu"]
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - nothing is bound to it here
SETTINGS = {environment_variable(field): field for field in Settings.model_fields}


@dataclass(frozen=True)
class Stage:
    base: str
    name: str
    instructions: list[tuple[str, str]]


def stages():
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    found = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line.strip():
            continue
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            base, _, name = rest.split()
            found.append(Stage(base, name, []))
        elif found:
            found[-1].instructions.append((word, rest.strip()))
    return {stage.name: stage for stage in found}


STAGES = stages()


def instructions(target, word):
    """List the arguments of an instruction in an image, inherited ones first."""
    stage = STAGES[target]
    inherited = instructions(stage.base, word) if stage.base in STAGES else []
    return inherited + [rest for name, rest in stage.instructions if name == word]


def test_the_image_compiles_kernels_of_known_models_for_known_gpus():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    arguments = dict(re.findall(r'^ARG (COMPILED_\w+)="([^"]+)"', text, re.MULTILINE))

    assert set(arguments["COMPILED_MODELS"].split()) <= {"bundled", *shapes()}
    assert all(known_processors(name) for name in arguments["COMPILED_GPUS"].split())


def environment(target):
    pairs = shlex.split(" ".join(instructions(target, "ENV")))
    return dict(pair.split("=", 1) for pair in pairs)


def context_sources(stage):
    copies = [rest.split() for word, rest in stage.instructions if word == "COPY"]
    return [source for copy in copies if not copy[0].startswith("--from") for source in copy[:-1]]


# The Dockerfile.


def test_the_default_target_is_the_cpu_image():
    assert set(TARGETS) <= set(STAGES)
    assert list(STAGES)[-1] == "cpu"


def test_all_stages_use_one_base_image_that_a_build_argument_names():
    bases = {stage.base for stage in STAGES.values()} - set(STAGES)

    assert bases == {"${BASE_IMAGE}"}
    assert re.search(r"^ARG BASE_IMAGE=python:3\.\d+-\S+$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_an_unprivileged_user(target):
    user, group = instructions(target, "USER")[-1].split(":")

    assert int(user) > 1000
    assert int(group) > 1000
    assert STAGES[target].instructions[-1][0] == "LABEL", "an instruction after USER runs as it"


@pytest.mark.parametrize("target", TARGETS)
def test_the_service_receives_signals_directly_without_a_shell(target):
    assert json.loads(instructions(target, "ENTRYPOINT")[-1]) == ["tessera", "serve"]
    assert instructions(target, "STOPSIGNAL") == ["SIGTERM"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_uses_only_programs_in_the_image(target):
    options, command = instructions(target, "HEALTHCHECK")[-1].split(" CMD ")
    script = json.loads(command)[-1]
    limit = int(re.search(r"--timeout=(\d+)s", options)[1])

    assert f"deploy/healthcheck.py {script}" in instructions(target, "COPY")
    assert limit > healthcheck._TIMEOUT_SECONDS
    assert not re.search(r"\b(curl|wget)\b", DOCKERFILE)


def test_only_the_gpu_image_has_a_c_compiler_because_triton_needs_it_at_run_time():
    assert any(" gcc libc6-dev" in run for run in instructions("gpu", "RUN"))
    assert not any("gcc" in run for run in instructions("cpu", "RUN"))


@pytest.mark.parametrize("target", TARGETS + RAY)
def test_an_image_keeps_no_downloaded_packages_of_the_distribution(target):
    installs = [run for run in instructions(target, "RUN") if "apt-get install" in run]

    assert installs
    for run in installs:
        assert {"/var/lib/apt/lists/*", "/var/cache/apt/*"} <= set(run.split())


@pytest.mark.parametrize("name", ["packages-cpu", "packages-gpu"])
def test_a_change_of_the_source_does_not_reinstall_dependencies(name):
    sources = set()
    while name in STAGES:
        sources |= set(context_sources(STAGES[name]))
        name = STAGES[name].base

    assert sources == {"deploy/requirements"}


def test_every_installed_package_has_a_hash_but_those_of_pytorchs_index():
    installs = re.findall(r"pip (?:--python \S+ )?install ([^&]*)", DOCKERFILE.replace("\\\n", " "))
    free = [it for it in installs if "--require-hashes" not in it and "--no-index" not in it]

    assert all("requirements/torch-" in it for it in free)
    assert len(free) == 2
    assert "--no-index" in re.search(r"pip wheel .*", DOCKERFILE)[0]


@pytest.mark.parametrize("target", RAY)
def test_a_ray_image_is_as_unprivileged_as_the_others_and_leaves_the_command_to_an_operator(target):
    assert instructions(target, "USER")[-1] == instructions("cpu", "USER")[-1]
    assert json.loads(instructions(target, "ENTRYPOINT")[-1]) == []
    assert json.loads(instructions(target, "CMD")[-1])[1:3] == ["-m", "tessera.server.ray.main"]
    assert environment(target)["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert "empty-response" in environment(target)["RAY_SERVE_HAPROXY_RETRY_ON"]


@pytest.mark.parametrize("target", TARGETS + RAY)
def test_an_image_has_a_list_of_its_packages(target):
    stage = STAGES[f"app-{target}"]

    assert any("--output-file /opt/tessera/sbom.json" in rest for _, rest in stage.instructions)
    assert f"--from=app-{target} /opt/tessera /opt/tessera" in instructions(target, "COPY")


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_sets_only_existing_settings_to_allowed_values(target):
    settings = {k: v for k, v in environment(target).items() if k.startswith("TESSERA_")}

    assert set(settings) <= set(SETTINGS)
    read = Settings.model_validate({SETTINGS[k]: v for k, v in settings.items()})
    assert read.host == EVERY_ADDRESS
    assert [str(read.port)] == instructions(target, "EXPOSE")
    assert read.device == {"cpu": "cpu", "gpu": "cuda"}[target]


@pytest.mark.parametrize("target", TARGETS)
def test_the_labels_describe_the_image(target):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = dict(
        pair.split("=", 1) for pair in shlex.split(" ".join(instructions(target, "LABEL")))
    )

    assert labels["org.opencontainers.image.version"] == project["version"]
    assert labels["org.opencontainers.image.licenses"] == project["license"]
    assert labels["org.opencontainers.image.description"].startswith("A text-generation server")


def test_every_copied_path_exists_and_is_not_ignored():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    sources = {source for stage in STAGES.values() for source in context_sources(stage)}

    assert "*" in lines
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


# The health check.


@pytest.fixture
def serve():
    """Start a fake service with a status for /health; return its port."""
    servers = []

    def start(status):
        class Health(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status if self.path == "/health" else 404)
                self.end_headers()
                self.wfile.write(b'{"state":"ready"}')

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Health)
        servers.append((server, threading.Thread(target=server.serve_forever, args=(0.01,))))
        servers[-1][1].start()
        return server.server_address[1]

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def check(**variables):
    return subprocess.run(
        [sys.executable, ROOT / "deploy/healthcheck.py"],
        check=False,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


def test_the_health_check_passes_while_the_service_on_the_configured_port_is_ready(serve):
    done = check(TESSERA_PORT=str(serve(200)), TESSERA_HOST=EVERY_ADDRESS)

    assert (done.returncode, done.stdout) == (0, '200 {"state":"ready"}\n')


def test_the_health_check_fails_while_the_service_is_not_ready_and_prints_its_reply(serve):
    done = check(TESSERA_PORT=str(serve(503)))

    assert (done.returncode, done.stdout) == (1, '503 {"state":"ready"}\n')


def test_the_health_check_fails_with_the_address_if_no_service_answers(serve):
    serve(200)
    done = check(TESSERA_PORT="1")

    assert done.returncode == 1
    assert "127.0.0.1 port 1: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_health_check_ignores_a_proxy(serve):
    done = check(TESSERA_PORT=str(serve(200)), http_proxy="http://127.0.0.1:1")

    assert done.returncode == 0


@pytest.mark.parametrize(
    ("command", "variables", "expected"),
    [
        ("", {}, ("127.0.0.1", 8000)),
        ("", {"TESSERA_PORT": "", "TESSERA_HOST": ""}, ("127.0.0.1", 8000)),
        ("", {"TESSERA_PORT": "9000", "TESSERA_HOST": "::"}, ("::1", 9000)),
        ("python /opt/tessera/bin/tessera serve --port 9001", {"TESSERA_PORT": "9000"}, 9001),
        ("/sbin/docker-init -- tessera serve --model x --port=9002", {}, 9002),
        ("tessera serve --host 10.0.0.7", {"TESSERA_HOST": EVERY_ADDRESS}, ("10.0.0.7", 8000)),
        ("python -m http.server --port 9003", {}, 8000),
        ("node serve --port 9004", {}, 8000),
    ],
)
def test_the_health_check_uses_the_address_of_the_service(command, variables, expected):
    host, port = healthcheck.address(command.split(), variables)

    assert expected in (port, (host, port))


# The Compose file.


def test_prometheus_scrapes_the_port_and_the_route_of_the_metrics():
    (job,) = PROMETHEUS["scrape_configs"]
    ((target,),) = (config["targets"] for config in job["static_configs"])

    assert target == f"tessera:{Settings.model_fields['port'].default}"
    assert "GET" in ROUTES[job["metrics_path"]]


def test_the_scraped_name_is_an_alias_of_the_gpu_service_too():
    assert "tessera" in SERVICES
    assert SERVICES["tessera-gpu"]["networks"]["default"]["aliases"] == ["tessera"]


@pytest.mark.parametrize(("name", "target"), [("tessera", "cpu"), ("tessera-gpu", "gpu")])
def test_a_profile_builds_and_runs_its_target(name, target):
    service = SERVICES[name]

    assert service["profiles"] == [target]
    assert service["image"] == f"tessera:{target}"
    assert service["build"]["target"] == target
    assert (ROOT / "deploy" / service["build"]["context"]).resolve() == ROOT
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert set(service["build"]["args"]) <= arguments


def test_compose_runs_on_a_cpu_by_default():
    assert "COMPOSE_PROFILES=cpu\n" in (ROOT / "deploy/.env").read_text()


def test_only_the_gpu_service_reserves_a_gpu():
    (device,) = SERVICES["tessera-gpu"]["deploy"]["resources"]["reservations"]["devices"]

    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert "deploy" not in SERVICES["tessera"]


@pytest.mark.parametrize("name", ["tessera", "tessera-gpu"])
def test_compose_sets_only_existing_settings(name):
    variables = {k for k in SERVICES[name]["environment"] if k.startswith("TESSERA_")}

    assert variables <= set(SETTINGS)
    assert not variables & {"TESSERA_PORT", "TESSERA_HOST", "TESSERA_DEVICE"}, "the image has them"


@pytest.mark.parametrize("name", ["tessera", "tessera-gpu"])
def test_caches_outlive_the_container(name):
    volumes = dict(volume.split(":") for volume in SERVICES[name]["volumes"])
    image = environment(SERVICES[name]["build"]["target"])

    assert set(volumes) <= set(COMPOSE["volumes"])
    assert set(volumes.values()) == {image["HF_HOME"], image["TRITON_CACHE_DIR"]}


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_minimal_privileges_and_publishes_only_on_the_loopback_address(name):
    service = SERVICES[name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert all(port.startswith("${PUBLISH_ADDRESS:-127.0.0.1}:") for port in service["ports"])


@pytest.mark.parametrize("name", ["tessera", "tessera-gpu"])
def test_the_stop_period_covers_the_shutdown_of_requests_and_engine(name):
    service = SERVICES[name]
    period = int(service["stop_grace_period"].removesuffix("s"))
    variables = [service["environment"][f"TESSERA_DRAIN_{part}"] for part in ("DELAY", "TIMEOUT")]
    requests = sum(float(variable.partition(":-")[2].removesuffix("}")) for variable in variables)

    assert front_end_pool._STOP_SECONDS > 2 * serving._FLUSH_SECONDS
    assert period > requests + front_end_pool._STOP_SECONDS + supervisor.STOP_SECONDS


def test_prometheus_waits_until_the_service_is_healthy():
    waits = SERVICES["prometheus"]["depends_on"]

    assert set(waits) == {"tessera", "tessera-gpu"}
    assert all(wait["condition"] == "service_healthy" for wait in waits.values())
    assert re.search(r":v\d+\.\d+\.\d+", SERVICES["prometheus"]["image"])


# The documents.


@pytest.mark.parametrize("path", ["README.md", "docs/operations.md"])
def test_a_document_names_only_existing_settings_and_build_arguments(path):
    text = (ROOT / path).read_text()
    arguments = set(re.findall(r"--build-arg (\w+)", text))

    assert set(re.findall(r"TESSERA_[A-Z_]+", text)) <= set(SETTINGS)
    assert arguments <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert {f"--target {target}" for target in TARGETS} <= set(re.findall(r"--target \w+", text))
