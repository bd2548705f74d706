"""The part of `hpc-train submit` that has each rank of a batch job run in an image."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from hpc_train.config import RunConfig
from hpc_train.config import file as config_file
from hpc_train.errors import print_line
from hpc_train.launch import IMAGE_TOOLS, containers
from hpc_train.launch.batch import BatchJob
from hpc_train.launch.containers import Container
from hpc_train.launch.request import SubmitRequest, by_launch
from hpc_train.launch.sites import Site
from hpc_train.warm.key import WARM


def in_image(batch: BatchJob, request: SubmitRequest, site: Site, config: RunConfig) -> BatchJob:
    """A batch job whose ranks run in the image that the request names.

    `hpc-train launch` is told the image. Behind another launcher the command itself is changed.

    Args:
        batch: the job without the image.
        request: what the user asks for.
        site: the site's profile.
        config: the configuration, or that of a command, which has a run directory only.

    Raises:
        UserError: there is no such image, or the tool cannot read it.
    """
    container = _container(request, site, config)
    command = [containers.PYTHON, *batch.command[1:]] if request.config else batch.command
    launcher = list(batch.launcher)
    environ = {**batch.environ, **site.container.environ}
    if by_launch(request, site):
        if request.command:  # `launch` does not know their run directory
            seen = container.bind_words(container.binds)
            container = replace(container, options=[*container.options, *seen])
        launcher[-1:-1] = container.as_options
    else:
        environ[WARM] = "off"
        command = container.command(command, batch.resources.ranks)
    return replace(
        batch,
        command=command,
        launcher=launcher,
        environ=environ,
        setup=[*site.setup, *site.container.setup, *batch.setup[len(site.setup) :]],
    )


def _container(request: SubmitRequest, site: Site, config: RunConfig) -> Container:
    wanted = request.image_tool or site.container.tool
    tool = wanted or containers.find_tool(None, request.image)
    if not tool:
        tool = IMAGE_TOOLS[0]
        print_line(
            f"hpc-train submit: no program that runs images is here: the job will use {tool}; "
            "--image_tool names another",
            sys.stderr,
        )
    return containers.made_container(
        request.image,
        tool,
        [shlex.join(site.container.options), *request.image_options],
        containers.seen_paths([Path.cwd(), Path(config.run.dir)], config_file.paths_of(config)),
    )
