"""An MPIJob of Kubernetes' mpi-operator. Sources: mpi-operator v2beta1, kubectl's reference."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from hpc_train import files
from hpc_train.errors import UserError
from hpc_train.launch import TEMPLATES, SchedulerName
from hpc_train.launch.schedulers.base import LEAVE, QueuedJob, Scheduler, ask, silent, submitted

if TYPE_CHECKING:
    from hpc_train.launch.batch import BatchJob
    from hpc_train.launch.resources import Resources

VOLUME = PurePosixPath("/data")  # where the pods have the volume of the template
CONFIG = "/etc/hpc_train/job.yaml"  # where they have the configuration


class MpiJob(Scheduler):
    """Kubernetes: the script is a manifest, and each pod runs an image.

    The pods have the configuration from a ConfigMap. The run directory is on their volume.
    """

    name: SchedulerName = "mpijob"
    template = "mpijob.yaml"
    submits = ("kubectl", "create", "-o", "name", "-f")
    deletes = ("kubectl", "delete")
    gpu_option = "nvidia.com/gpu"
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("time", "account", "queue", "directive", "setup", "requeue_by", "chain", "sweep"),
            *("qos", "constraint", "mail", "exclusive", "reservation", "resources"),
            *("tasks_at_once", "image_tool", "image_options", "stage"),
        ),
        LEAVE,
    )

    def text(self, batch: BatchJob) -> str:
        """The manifest of a job.

        Raises:
            UserError: Kubernetes would refuse the job's name, or the pods lack the run directory.
        """
        if not re.fullmatch("[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?", batch.name):
            raise UserError(
                f"the name {batch.name!r} is not allowed by Kubernetes",
                "give --name with up to 53 lower-case letters, digits and - only",
            )
        tree: dict[str, Any] = yaml.safe_load(
            (TEMPLATES / self.template).read_text(encoding="utf-8")
        )
        tree["metadata"] = {"generateName": f"{batch.name}-"}  # kubectl adds five characters
        spec = tree["spec"]
        asked = batch.resources
        spec["slotsPerWorker"] = asked.ranks_per_node
        spec["runPolicy"]["backoffLimit"] = batch.max_requeues
        launcher, worker = (
            spec["mpiReplicaSpecs"][role]["template"]["spec"] for role in ("Launcher", "Worker")
        )
        spec["mpiReplicaSpecs"]["Worker"]["replicas"] = asked.nodes
        for pod in (launcher, worker):
            _complete(pod, batch)
        container = launcher["containers"][0]
        container["command"] = [_literal(word) for word in batch.launcher]
        container["args"] = [_literal(word) for word in batch.command]
        limits = worker["containers"][0]["resources"]["limits"]
        limits["cpu"] = asked.ranks_per_node * asked.threads
        if asked.memory_gb:
            limits["memory"] = f"{asked.memory_gb}G"
        if asked.gpus:
            limits[asked.gpu_option] = asked.gpus
        return _yaml(tree)

    def launch_words(self, asked: Resources, environ: Mapping[str, str]) -> list[str]:
        """What `hpc-train launch` has to be told: the launcher's pod has other cores than these."""
        given = environ.get("OMP_NUM_THREADS", "")
        threads = int(given) if given.isdecimal() and int(given) else asked.threads
        return ["--cores", str(asked.ranks_per_node * threads)]

    def queue(self, batch: BatchJob, after: str = "") -> list[str]:
        """Create the configuration and the job in the cluster; returns the job's name."""
        if batch.configuration:
            path = Path(batch.script).with_name("configmap.yaml")
            files.write_text(path, _yaml(_config_map(batch)))
            submitted(["kubectl", "apply", "-f", str(path)])
        return [submitted([*self.submits, batch.script]).strip()]

    def queued(self, ids: Sequence[str]) -> list[QueuedJob]:
        """The jobs of these that the cluster has and that have not ended."""
        found = []
        shown = "jsonpath={.metadata.name}|{.status.conditions[-1:].type}"
        for name in ids:
            done = ask(["kubectl", "get", name, "--ignore-not-found", "-o", shown])
            if done.returncode:
                raise silent(done)
            _, there, state = done.stdout.strip().partition("|")
            if there and state not in ("Succeeded", "Failed"):
                found.append(QueuedJob(name, state or "Created"))
        return found


def on_volume(run_dir: str) -> str:
    """The run directory as pods see it: a relative one is on the volume.

    Raises:
        UserError: it is elsewhere, where it would be lost with the pod.
    """
    path = VOLUME / run_dir
    if VOLUME not in path.parents or ".." in path.parts:
        raise UserError(
            f"run.dir is {run_dir}, which is not on the volume of the pods",
            f"give a relative path, or one below {VOLUME}",
        )
    return str(path)


class _Dumper(yaml.SafeDumper):
    """Writes strings in double quotes, unless no reader of YAML can take them for anything else.

    PyYAML leaves out the quotes of y, 1e-3 and 0o17, which Kubernetes reads as other values.
    """

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Surrogates stand for the bytes of letters that the locale does not have.
        data = data.encode(errors="surrogateescape").decode(errors="replace")
        plain = re.fullmatch(r"-{0,2}[A-Za-z/][\w./:@-]+|--", data, re.ASCII)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain else '"')


_Dumper.add_representer(str, _Dumper.represent_str)


def _yaml(tree: Mapping[str, Any]) -> str:
    """A manifest, in ASCII."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def _literal(word: str) -> str:
    """A word as Kubernetes expands it to itself: $$ stands for $, and $(NAME) for a variable."""
    return word.replace("$", "$$")


def _config_map(batch: BatchJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _config_name(batch)},
        "data": {"job.yaml": batch.configuration},
    }


def _config_name(batch: BatchJob) -> str:
    """A name that other configurations do not have, so that a waiting job keeps its own."""
    return f"{batch.name}-{hashlib.sha256(batch.configuration.encode()).hexdigest()[:8]}"


def _complete(pod: dict[str, Any], batch: BatchJob) -> None:
    """Give a pod its image, variables and configuration."""
    container = pod["containers"][0]
    container["image"] = batch.image
    environ = {"OMP_NUM_THREADS": str(batch.resources.threads), **batch.environ}
    container["env"] = [{"name": name, "value": _literal(value)} for name, value in environ.items()]
    if batch.configuration:
        mount = {"name": "config", "mountPath": CONFIG, "subPath": "job.yaml"}
        container["volumeMounts"].append(mount)
        pod["volumes"].append({"name": "config", "configMap": {"name": _config_name(batch)}})
