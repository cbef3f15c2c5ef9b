"""deploy/kubernetes: manifests are valid, name what is there, and run what Rollbook has.

CRDs are not in any package; with a folder of them in ROLLBOOK_CRDS resources are checked against those too.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.deploy.conftest import Settings

from rollbook.ingest.access import ROUTES
from rollbook.store.settings import StoreSettings

VERSIONS = ("1.30", "1.37")
FROM_OTHERS = {"catalog-app": ("username", "password")}
"""Secrets that somebody else makes: CloudNativePG, of a cluster named catalog."""
Resource = dict[str, Any]


def _made(folder: Path, kustomization: Resource) -> Iterator[Resource]:
    """The ConfigMaps and Secrets that kustomize makes."""
    for one in kustomization["configMapGenerator"]:
        data = {name: (folder / name).read_text() for name in one.get("files", [])}
        data |= dict(literal.split("=", 1) for literal in one.get("literals", []))
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": one["name"]}, "data": data}
    for one in kustomization["secretGenerator"]:
        data = {Path(name).name: (folder / name).read_bytes() for name in one.get("files", [])}
        for name in one.get("envs", []):
            lines = (folder / name).read_text().splitlines()
            data |= {line.split("=", 1)[0]: line.split("=", 1)[1].encode() for line in lines}
        coded = {name: base64.b64encode(value).decode() for name, value in data.items()}
        yield {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": one["name"]}, "data": coded}


@pytest.fixture(scope="module")
def folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, with secrets made as the page says."""
    folder = tmp_path_factory.mktemp("deploy") / "kubernetes"
    own = shutil.ignore_patterns("SECRET", "credentials.env")
    shutil.copytree(root / "deploy" / "kubernetes", folder, ignore=own)
    (folder / "secrets" / "SECRET").write_bytes(os.urandom(32))
    shutil.copy(folder / "secrets" / "credentials.example.env", folder / "secrets" / "credentials.env")
    return folder


@pytest.fixture(scope="module")
def resources(folder: Path) -> list[Resource]:
    """All that is applied."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found = [one for name in kustomization["resources"] for one in yaml.safe_load_all((folder / name).open())]
    return [*found, *_made(folder, kustomization)]


@pytest.fixture(scope="module")
def templates(resources: list[Resource]) -> dict[str, Resource]:
    """Name -> pod template."""
    found = {}
    for one in resources:
        if one["kind"] in ("Deployment", "StatefulSet"):
            found[one["metadata"]["name"]] = one["spec"]["template"]
        elif one["kind"] == "RayJob":
            cluster = one["spec"]["rayClusterSpec"]
            found["head"] = cluster["headGroupSpec"]["template"]
            found |= {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    assert set(found) == {"proxy", "viewer", "head", "ranks"}
    return found


@pytest.fixture(scope="module")
def settings(folder: Path) -> Settings:
    """Of the ConfigMap."""
    return Settings(folder, {})


def named(resources: list[Resource], kind: str, name: str) -> Resource:
    """One of them."""
    [found] = [one for one in resources if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def containers(template: Resource) -> list[Resource]:
    """Those of a pod, those that come before too."""
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


@pytest.mark.parametrize("version", VERSIONS)
def test_resources_are_valid(resources: list[Resource], templates: dict[str, Resource], version: str) -> None:
    """By the schemas of a version of Kubernetes, which know each key; pods of KubeRay too."""
    ours = [
        one
        for one in resources
        if "." not in one["apiVersion"].partition("/")[0] or ".k8s.io" in one["apiVersion"]
    ]
    assert {one["kind"] for one in resources} - {one["kind"] for one in ours} == {"Cluster", "RayJob"}
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
        for name, template in templates.items()
    ]
    for one in [*ours, *pods]:
        kubernetes_validate.validate(one, version, strict=True)


def test_a_wrong_key_is_found(templates: dict[str, Resource]) -> None:
    """So the schemas do look."""
    wrong = {"apiVersion": "v1", "kind": "PodTemplate", "template": {"spec": {"container": []}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.parametrize("kind", ["Cluster", "RayJob"])
def test_other_resources_are_valid(resources: list[Resource], kind: str) -> None:
    """By the CRDs of CloudNativePG and KubeRay, where somebody has them."""
    if not (crds := os.environ.get("ROLLBOOK_CRDS")):
        pytest.skip("ROLLBOOK_CRDS names no folder of CRDs")
    [crd] = [
        crd
        for path in Path(crds).glob("*.yaml")
        for crd in yaml.safe_load_all(path.read_text())
        if crd["spec"]["names"]["kind"] == kind
    ]
    [one] = [one for one in resources if one["kind"] == kind]
    version = one["apiVersion"].partition("/")[2]
    [schema] = [v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"] if v["name"] == version]
    _close(schema)
    jsonschema.Draft7Validator(schema).validate(one)


def _close(schema: Any) -> None:
    """Let a CRD's schema know no other keys than its own."""
    if isinstance(schema, dict):
        if "properties" in schema and schema.get("type") == "object" and "kind" not in schema["properties"]:
            schema.setdefault("additionalProperties", False)
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("type", None)
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _close(part)


def test_kustomize_makes_the_same(folder: Path, resources: list[Resource]) -> None:
    """Where there is kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    places = [{(one["kind"], one["metadata"]["name"]) for one in found} for found in (made, resources)]
    assert places[0] == places[1]
    assert "image: rollbook-" not in done.stdout


def test_commands_are_ours(
    resources: list[Resource],
    templates: dict[str, Resource],
    settings: Settings,
    parsed: Callable[[list[str]], dict[str, Any]],
) -> None:
    """Those of containers, and the job's; a proxy's number is its pod's, and each rank has a pod."""
    for name, template in templates.items():
        for container in containers(template):
            words = [word.replace("$(POD_NUMBER)", "1") for word in container.get("args", [])]
            assert "command" not in container  # the image begins with deploy/begin.py
            if words and words != ["true"]:
                params = parsed(words)
                assert name != "proxy" or params["proxy"] == 1
    job = named(resources, "RayJob", "trainer")["spec"]
    params = parsed(shlex.split(job["entrypoint"]))
    groups = job["rayClusterSpec"]["workerGroupSpecs"]
    assert params["ranks"] == 1 + sum(group["replicas"] for group in groups)
    assert params["launch"] == "ray"
    assert Path(params["config"]).parent == Path("/etc/rollbook")


def test_variables_and_what_they_are_made_of(
    resources: list[Resource], templates: dict[str, Resource], known: Callable[[Iterable[str]], list[str]]
) -> None:
    """Each is read by somebody; each key of a ConfigMap or Secret that is named is there."""
    keys = {
        (one["kind"], one["metadata"]["name"]): set(one["data"])
        for one in resources
        if one["kind"] in ("ConfigMap", "Secret")
    } | {("Secret", name): set(of) for name, of in FROM_OTHERS.items()}
    for template in templates.values():
        for container in containers(template):
            variables = {one["name"]: one for one in container.get("env", [])}
            for name, one in variables.items():
                before = list(variables)[: list(variables).index(name)]
                assert set(re.findall(r"\$\((\w+)\)", one.get("value", ""))) <= set(before), name
                if (of := one.get("valueFrom", {}).get("secretKeyRef")) is not None:
                    assert of["key"] in keys["Secret", of["name"]]
            for source in container.get("envFrom", []):
                kind = "ConfigMap" if "configMapRef" in source else "Secret"
                variables |= dict.fromkeys(keys[kind, next(iter(source.values()))["name"]])
            assert known(variables) == []
            volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts <= {*volumes, "data"}
            if "args" in container:
                assert "/data" in {mount["mountPath"] for mount in container["volumeMounts"]}
            for volume in volumes.values():
                if "configMap" in volume:
                    assert ("ConfigMap", volume["configMap"]["name"]) in keys
                if "secret" in volume:
                    assert keys["Secret", volume["secret"]["secretName"]] == {"SECRET"}


def test_settings_fit(
    resources: list[Resource], settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They load; as many proxies as pods; addresses are those of services; what they lead to is allowed."""
    environment = named(resources, "ConfigMap", "rollbook-environment")["data"]
    monkeypatch.setenv("ROLLBOOK_ALLOW", environment["ROLLBOOK_ALLOW"])
    settings.check_allowed()
    settings.check_agree()
    pods = named(resources, "StatefulSet", "proxy")["spec"]
    wanted = [f"http://proxy-{n}.{pods['serviceName']}:8000" for n in range(pods["replicas"])]
    assert list(settings.serve.proxies) == wanted
    assert settings.serve.allow_host[0] == "rollbook"
    assert named(resources, "Service", "rollbook")["spec"]["ports"][0]["port"] == settings.serve.port
    values = yaml.safe_load((folder / "nats-values.yaml").read_text())["config"]
    count = values["cluster"]["replicas"]
    assert settings.nats == [f"nats-{n}.nats-headless:4222" for n in range(count)]
    assert count == 3
    assert values["jetstream"]["enabled"]
    assert settings.train.sync is not None
    named(resources, "Service", settings.train.sync.address)
    assert StoreSettings().medium.url is None  # so what was looked at is the file's


def test_probes_ask_for_what_is_there(templates: dict[str, Resource], settings: Settings) -> None:
    """By an open route, at the port that the container's command listens at."""
    asked = 0
    for template in templates.values():
        for container in template["spec"]["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                if (probe := container.get(kind)) is None:
                    continue
                [way] = [probe[way] for way in ("httpGet", "tcpSocket") if way in probe]
                assert ports[way["port"]] == (8080 if "view" in container["args"] else settings.serve.port)
                if "httpGet" in probe:
                    assert ROUTES.of("GET", way["path"]).open
                asked += 1
    assert asked == 6


def test_selectors_find_pods(resources: list[Resource], templates: dict[str, Resource]) -> None:
    """Of services, budgets and policies; each policy's port is one of the pods that it is for."""
    labels = [template["metadata"]["labels"] for template in templates.values()]
    others = ("nats", "cnpg", "batch.kubernetes.io", "kuberay", "cloudnative", "agent", "reader", "engine")
    for one in resources:
        spec, kind = one.get("spec", {}), one["kind"]
        if kind == "Service":
            assert any(spec["selector"].items() <= label.items() for label in labels)
        if kind in ("StatefulSet", "Deployment", "PodDisruptionBudget"):
            assert any(spec["selector"]["matchLabels"].items() <= label.items() for label in labels)
        if kind == "NetworkPolicy":
            for found in re.findall(r"'matchLabels': (\{.*?\})", str(spec)):
                of = yaml.safe_load(found)
                ours = any(of.items() <= label.items() for label in labels)
                assert ours or any(other in found for other in others), found


def test_pods_are_no_more_than_a_user(templates: dict[str, Resource]) -> None:
    """Nobody is root, gains rights, or writes beside its volumes; each has a bound of memory."""
    for template in templates.values():
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        assert template["spec"]["automountServiceAccountToken"] is False
        for container in containers(template):
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"]
            assert not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def test_ray_is_the_images(root: Path, resources: list[Resource]) -> None:
    """KubeRay asks a Ray's health in the way of the version that it is told."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (root / "constraints.txt").read_text(), re.MULTILINE))
    cluster = named(resources, "RayJob", "trainer")["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == pins["ray"]


def test_the_image_has_the_package(root: Path) -> None:
    """It copies all that the wheel is made of, and installs extras that there are."""
    text = (root / "deploy" / "Containerfile").read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    wanted = {name.partition("/")[0] for name in project["tool"]["hatch"]["build"]["only-include"]}
    assert copied == wanted
    extras = {extra for found in re.findall(r"whl\)\[([\w,]+)\]", text) for extra in found.split(",")}
    assert {"cluster", "postgres", "ray"} == extras
    assert extras <= set(project["project"]["optional-dependencies"])
    assert "ROLLBOOK_STORE=/data/runs" in text
