"""A cluster as a YAML file describes it, checked before anything starts.

name: pilotfish
key: /etc/pilotfish/cluster.key          # the same on every host
roles:
  api:     {count: 2}
  target:  {count: 2, most: 4, model: /models/target, devices: {target_device: 1}, options: {kv_slots: 65536}}
  draft:   {count: 2, model: /models/draft, devices: {draft_device: 1}, revision: v1}
  prefill: {count: 1, devices: {prefill_device: 1}}
"""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.config.workers import OF_PREFILLS, POOL_MODEL, DraftConfig, PrefillConfig
from pilotfish.errors import InputError, ParameterError, UnknownOptionError
from pilotfish.files import file_bytes
from pilotfish.options import Option, check_options, option, options_of, pick, refuse_unknown, text

Role = Literal["api", "target", "draft", "prefill"]
ROLES: tuple[Role, ...] = get_args(Role)
#: Their names in Ray Serve.
DEPLOYMENTS: Mapping[Role, str] = {"api": "Api", "target": "Target", "draft": "DraftPool", "prefill": "PrefillPool"}
#: Bytes of a file, and characters of what is said of it.
MAX_FILE, LONGEST = 1 << 16, 2000
#: Where pools listen until they know their host.
LISTEN = "tcp://127.0.0.1:0"
#: Files in a process's directory: its allowlist, where the cluster has a key; the pools, for a target.
ALLOW, MEMBERS = "allow", "members.json"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_RESOURCE = re.compile(r"[A-Za-z_][\w.:/-]{0,63}")
#: Ray's own resources, and what asks for them.
_RAYS = {"CPU": "cpus", "GPU": "gpus", "memory": "options.memory", "object_store_memory": "nothing that uses it"}
#: Options that follow from the cluster's other roles and its key.
_FOLLOW = frozenset(
    {"target", "draft", "insecure", "trace", "members"}
    | {f"{role}_{what}" for role in ("draft", "prefill") for what in ("workers", "cores", "pool", "pool_key", "key")}
)
_OF_SERVERS = frozenset({"replicas", "target_pool", "target_pool_key", "target_key"})
_OF_POOLS = frozenset({"listen", "name", "key", "allow", "insecure", "trace", "revision"})


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """`count` processes of a role, and up to `most` targets under load. Each is placed on a host with `cpus`, `gpus`,
    `devices` (custom resources of Ray), for each rank, and `labels`, and owns them. `options` are those of the role's
    command, with underscores; `environment` is that of its process."""

    model: Path | None = None
    count: Annotated[int, option("", 0, 1024)] = 1
    most: Annotated[int, option("", 1, 1024)] | None = None
    cpus: Annotated[float, option("", 0, 4096)] = 1.0
    gpus: Annotated[float, option("", 0, 1024)] = 0.0
    devices: Mapping[str, Annotated[float, option("", high=4096, above=0)]] = field(default_factory=dict)
    labels: Mapping[str, Annotated[str, text(1, 63)]] = field(default_factory=dict)
    environment: Mapping[str, Annotated[str, text(0, 4096)]] = field(default_factory=dict)
    revision: Annotated[str, text(0, 64)] = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options(self)
        if self.most is not None and self.most < max(self.count, 1):
            raise ParameterError("most", self.most, f"an integer {max(self.count, 1)} to 1024")
        for name in self.devices:
            if name in _RAYS:
                raise ParameterError("devices", name, f"a name of your own; Ray's is asked for by {_RAYS[name]}")
            if not _RESOURCE.fullmatch(name):
                raise ParameterError("devices", name, "names of up to 64 letters, digits or any of _.:/-")
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ParameterError("environment", f"{name}={value}", "names without =, and no zero bytes")


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """`address` is Ray's. `key` is the key file, the same on each host, by which processes of the cluster know each
    other: code in a Ray cluster can read any other secret. Without it they listen on loopback alone, unless `insecure`.
    `api_keys` is the file of the clients' keys. `proxies`: on which hosts with a process clients find the API."""

    roles: Mapping[Role, RoleConfig]
    name: str = "pilotfish"
    address: Annotated[str, text(1, 256)] = "auto"
    key: Path | None = None
    insecure: bool = False
    api_keys: Path | None = None
    allow_anonymous: bool = False
    proxies: Literal["every_host", "head"] = "every_host"
    start_timeout: Annotated[float, option("", high=86400, above=0, unit="seconds")] = 600.0
    drain_timeout: Annotated[float, option("", high=86400, above=0, unit="seconds")] = 60.0
    scale_up_after: Annotated[float, option("", 0, 86400, unit="seconds")] = 15.0
    scale_down_after: Annotated[float, option("", 0, 86400, unit="seconds")] = 300.0

    def __post_init__(self) -> None:
        check_options(self)
        if not _NAME.fullmatch(self.name):
            raise ParameterError("name", self.name, "up to 40 small letters, digits or -, no - at an end")

    def of(self, role: Role) -> RoleConfig:
        return self.roles.get(role) or RoleConfig(count=0)

    def model_of(self, role: Role) -> Path:
        model = self.of(role).model or self.of("target").model
        assert model is not None  # as `cluster_config` has checked
        return model

    def application(self, role: Role) -> str:
        return f"{self.name}-{role}"

    @property
    def pools(self) -> tuple[Role, ...]:
        return tuple(role for role in self.present if role in ("draft", "prefill"))

    def setup_of(self, role: Role) -> str:
        """Digest of all that its processes are told: an equal one needs no restart."""
        told = (self.of(role), self.model_of(role), self.key, self.insecure, self.drain_timeout, self.start_timeout)
        others = self.pools if role == "target" else ()
        clients = (self.api_keys, self.allow_anonymous) if role == "api" else ()
        return hashlib.sha256(repr((told, others, clients)).encode()).hexdigest()[:16]

    @property
    def present(self) -> tuple[Role, ...]:
        return tuple(role for role in ROLES if self.of(role).count)

    # -- what the processes of a role are told

    @property
    def engine(self) -> EngineConfig:
        mode: dict[str, Any] = {"mode": "async"} if self.of("draft").count else {}
        given = {"draft": self.of("draft").model, **self.of("target").options, **mode}
        return EngineConfig(target=self.model_of("target"), **given)

    def server_engine(self, members: Path) -> EngineConfig:
        return EngineConfig(target=self.model_of("api"), insecure=self.insecure, members=members)

    @property
    def server(self) -> ServerConfig:
        return ServerConfig(**self.of("api").options)

    @property
    def draft_pool(self) -> DraftConfig:
        model, own = _divided(self.of("draft").options)
        return DraftConfig(model=EngineConfig(target=self.model_of("draft"), **model), listen=LISTEN, **own)

    @property
    def prefill_pool(self) -> PrefillConfig:
        model, own = _divided(self.of("prefill").options)
        return PrefillConfig(model=EngineConfig(target=self.model_of("prefill"), **model), listen=LISTEN, **own)


def known_options(role: Role) -> dict[str, Option]:
    if role == "api":
        known = pick(ServerConfig, without=_OF_SERVERS)
    elif role == "target":
        known = pick(EngineConfig, without=_FOLLOW)
    else:
        model = {*POOL_MODEL, *(OF_PREFILLS if role == "prefill" else ())} - _OF_POOLS
        own = DraftConfig if role == "draft" else PrefillConfig
        known = [*pick(EngineConfig, *sorted(model)), *pick(own, without=_OF_POOLS)]
    return {one.name: one for one in known}


def _divided(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    model = {name: value for name, value in options.items() if name in options_of(EngineConfig)}
    return model, {name: value for name, value in options.items() if name not in model}


# -- the command of a role's process


def worker_command(config: ClusterConfig, role: Role, endpoint: str, name: str, directory: Path) -> list[str]:
    model = {"draft": "--draft", "prefill": "--target", "target": "--target"}[role]
    own = [f"{model}={config.model_of(role)}", f"--listen={endpoint}", f"--name={name}", "--json"]
    if config.of(role).revision:
        own += [f"--revision={config.of(role).revision}"]
    if role == "target" and config.pools:
        own += [f"--members={directory / MEMBERS}", *(["--mode=async"] if "draft" in config.pools else [])]
        own += [f"--{pool}-key={config.key}" for pool in config.pools if config.key is not None]
    if config.key is not None:
        own += [f"--key={config.key}", f"--allow={directory / ALLOW}"]
    if config.insecure:
        own += ["--insecure"]
    known = known_options(role)
    given = [flag for name, value in config.of(role).options.items() for flag in flags(known[name], value)]
    return [sys.executable, "-m", "pilotfish", role, *own, *given]


def flags(option: Option, value: Any) -> list[str]:
    if value is None or value == option.default:
        return []
    names = option.extra.get("names") or (f"--{option.name.replace('_', '-')}",)
    if option.kind is bool:
        return [names[0].split("/")[0 if value else 1]]
    return [f"{names[0]}={value}"]


# -- reading


def read_cluster_config(path: Path) -> ClusterConfig:
    """InputError names the file and the field."""
    content = file_bytes("config", path, MAX_FILE)
    from pilotfish.cluster.document import document  # of the extra

    try:
        return cluster_config(document(content))
    except InputError as error:  # which may quote a value that is as long as the file
        raise InputError(f"{path}: {shortened(str(error))}") from error


def cluster_config(given: Any) -> ClusterConfig:
    """InputError names the first bad field."""
    fields = dict(_mapping("the file", given))
    roles = _mapping("roles", fields.pop("roles", {}))
    for name in roles:
        if name not in ROLES:
            raise ParameterError("roles", name, " or ".join(ROLES))
    named = {role: _role(role, roles[role]) for role in ROLES if role in roles}
    for name in fields.keys() & {"key", "api_keys"}:
        fields[name] = fields[name] and _path(name, fields[name])
    config = ClusterConfig(roles=named, **fields)
    _check_roles(config)
    return config


def _role(role: Role, given: Any) -> RoleConfig:
    fields = dict(_mapping(f"roles.{role}", given))
    with _within(f"roles.{role}."):
        if "model" in fields:
            fields["model"] = _path("model", fields["model"])
        config = RoleConfig(**fields)
        if config.most is not None and role != "target":
            raise ParameterError("most", config.most, "none: only targets are added and taken away by their load")
        if config.revision and role != "draft":
            raise ParameterError("revision", config.revision, "none: only drafts are told apart by it")
    return replace(config, options=_options(role, config.options))


def _options(role: Role, given: Mapping[str, Any]) -> dict[str, Any]:
    known = known_options(role)
    with _within(f"roles.{role}.options."):
        for name in given:
            if name not in known:
                raise UnknownOptionError(name, sorted(known))
        return {name: _path(name, value) if known[name].kind is Path else value for name, value in given.items()}


def _check_roles(config: ClusterConfig) -> None:
    if not config.of("target").count:
        raise ParameterError("roles.target.count", 0, "an integer 1 to 1024")
    for role in config.present:
        if role in ("target", "draft") and config.of(role).model is None:
            raise ParameterError(f"roles.{role}.model", None, "a model directory in Hugging Face format")
    if config.of("draft").count and config.of("target").options.get("mode", "async") != "async":
        raise ParameterError("roles.target.options.mode", config.of("target").options["mode"], "async with roles.draft")
    checks = {"api": "server", "target": "engine", "draft": "draft_pool", "prefill": "prefill_pool"}
    for role in config.present:
        with _within(f"roles.{role}.options."):
            getattr(config, checks[role])
    if config.of("prefill").count and (ranks := config.engine.tensor_parallel) > 1:
        raise ParameterError("roles.target.options.tensor_parallel", ranks, "1 with roles.prefill")


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _mapping(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ParameterError(field, value, "a mapping of names")
    return value


def _path(field: str, value: Any) -> Path:
    if not isinstance(value, str) or not Path(value).is_absolute():
        raise ParameterError(field, value, "an absolute path, the same on each host")
    return Path(value)


@contextmanager
def _within(prefix: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{prefix}{error}") from error
