from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import WIDE, print_json, print_line, print_table, table_of, warn_line
from pilotfish.cluster.config import ClusterConfig, read_cluster_config
from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.errors import InputError

app = typer.Typer(help="Servers, targets and pools on a Ray cluster (docs/ray.md).", no_args_is_help=True)
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="What the cluster consists of.")]


@app.command()
def up(config: ConfigArgument, json: JsonOption = False) -> None:
    """Start what is not there, or not as CONFIG.yaml says, and return once all of it serves. What is missing is told
    before anything starts."""
    cluster = _read(config)
    from pilotfish.cluster import cluster as on_ray

    with on_ray.connected(cluster.address):
        url = on_ray.up(cluster, warn_line)
    if json:
        print_json({"url": url})
    else:
        print_line(f"serves at {url}" if url else "serves; its servers are elsewhere (serve --cluster)")


@app.command()
def status(config: ConfigArgument, json: JsonOption = False) -> None:
    """Show roles, hosts, load and versions."""
    cluster = _read(config)
    from pilotfish.cluster.cluster import connected, rows

    with connected(cluster.address):
        found = rows(cluster)
    if json:
        print_json({"processes": found})
    elif not found:
        print_line("nothing of it runs")
    else:
        print_table(table_of(found, left=found[0]), at_least=WIDE)


@app.command()
def down(config: ConfigArgument) -> None:
    """End all of it. Ray's own processes go on."""
    cluster = _read(config)
    from pilotfish.cluster import cluster as on_ray

    with on_ray.connected(cluster.address):
        on_ray.down(cluster)


@contextmanager
def on_cluster(path: Path, server: ServerConfig) -> Iterator[tuple[EngineConfig, ServerConfig]]:
    cluster = _read(path)
    from pilotfish.cluster.cluster import members_of

    with members_of(cluster) as members:
        yield cluster.server_engine(members), replace(server, target_key=cluster.key)


def _read(path: Path) -> ClusterConfig:
    if find_spec("ray") is None:
        raise InputError("ray: it is not installed; expected pilotfish[ray], as from pip install 'pilotfish[ray]'")
    return read_cluster_config(path)
