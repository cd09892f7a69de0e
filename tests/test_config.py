"""Settings come from flags, the environment, a file and defaults, and a typing error is an error."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gazette.broker.flags import BrokerFlags
from gazette.broker.main import print_config, schema
from gazette.cluster.process.groups import DebugFlags, EtcdFlags, LogFlags
from gazette.cluster.process.member import MemberFlags, ProcessFlags
from gazette.config.option import require_writable
from gazette.config.schema import Schema, duration, exit_with, setting
from gazette.errors import Invalid
from gazette.gazctl.commands import COMMANDS
from gazette.gazctl.contexts import Contexts
from gazette.gazctl.settings import schema_of
from tests.facts import raises


@dataclass(frozen=True, slots=True)
class CacheFlags:
    size: int = setting(0, "entries", name="cache.size")
    ttl: float = duration("1m", "age", name="cache.ttl")
    names: tuple[str, ...] = setting((), "names")
    fast: bool = setting(False, "switch")
    root: Path | None = setting(None, "directory")
    ratio: float = setting(0.5, "share")
    key: str = setting("", "key", secret=True)
    mode: str = setting("a", "mode", choices=("a", "b"))


@pytest.fixture
def cache() -> Schema:
    return Schema("prog", {"broker": CacheFlags}, file_stem="prog")


def load(
    schema: Schema,
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> CacheFlags:
    return schema.load(argv, environ or {}, directory=directory or Path("/nonexistent")).group(
        CacheFlags
    )


def test_defaults_are_used_where_nothing_is_given(cache: Schema) -> None:
    assert load(cache) == CacheFlags()
    assert load(cache).ttl == 60.0


def test_a_flag_wins_over_environment_over_file_over_default(cache: Schema, tmp_path: Path) -> None:
    (tmp_path / "prog.ini").write_text("[broker]\ncache.size = 1\ncache.ttl = 1s\nmode = b\n")
    environ = {"BROKER_CACHE_SIZE": "2", "BROKER_CACHE_TTL": "2s"}
    loaded = cache.load(["--broker.cache.size=3"], environ, directory=tmp_path)
    flags = loaded.group(CacheFlags)
    assert (flags.size, flags.ttl, flags.mode, flags.ratio) == (3, 2.0, "b", 0.5)
    assert loaded.sources["broker.cache.size"] == "flag"
    assert loaded.sources["broker.cache.ttl"] == "env BROKER_CACHE_TTL"
    assert loaded.sources["broker.mode"] == f"file {tmp_path / 'prog.ini'}"
    assert loaded.sources["broker.ratio"] == "default"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--broker.fast"], CacheFlags(fast=True)),
        (["--broker.fast=false"], CacheFlags(fast=False)),
        (["--broker.names=a", "--broker.names", "b,c"], CacheFlags(names=("a", "b", "c"))),
        (["--broker.cache.ttl", "1h30m"], CacheFlags(ttl=5400.0)),
        (["--broker.cache.ttl=0"], CacheFlags(ttl=0.0)),
        (["--broker.root=/a/b"], CacheFlags(root=Path("/a/b"))),
        (["--broker.root="], CacheFlags(root=None)),
        (["--broker.cache.size=-1"], CacheFlags(size=-1)),
        (["--broker.cache.size=1", "--broker.cache.size=2"], CacheFlags(size=2)),
    ],
)
def test_flags_are_read_as_their_kind(cache: Schema, argv: list[str], expected: CacheFlags) -> None:
    assert load(cache, argv) == expected


@pytest.mark.parametrize(
    ("argv", "environ", "text"),
    [
        (
            ["--broker.cach.size=1"],
            {},
            "unknown flag --broker.cach.size (did you mean --broker.cache.size?)",
        ),
        (["--qqqqqqqqq"], {}, "unknown flag --qqqqqqqqq"),
        (["stray"], {}, 'unexpected argument "stray"'),
        (
            ["--broker.cache.size=x"],
            {},
            '--broker.cache.size: invalid value "x": expected an integer',
        ),
        (["--broker.cache.size"], {}, "expected one argument"),
        (
            [],
            {"BROKER_CACHE_TTL": "20"},
            'BROKER_CACHE_TTL: invalid value "20": time: missing unit',
        ),
        ([], {"BROKER_FAST": "maybe"}, "expected true or false"),
        (["--broker.mode=c"], {}, "expected one of a, b"),
        (["--config=/no/such.ini"], {}, "configuration file does not exist"),
        ([f"--config={'x' * 300}"], {}, "configuration file does not exist"),
        (["--config=~no-such-user/x"], {}, "--config: it begins with an unknown home directory"),
        (["--broker.root=~no-such-user/x"], {}, "it begins with an unknown home directory"),
    ],
)
def test_what_is_wrong_is_named(
    cache: Schema, argv: list[str], environ: dict[str, str], text: str
) -> None:
    with pytest.raises(Invalid) as caught:
        load(cache, argv, environ)
    assert text in str(caught.value)


def test_an_environment_name_that_is_set_but_empty_is_as_good_as_not_set(cache: Schema) -> None:
    assert load(cache, environ={"BROKER_CACHE_SIZE": ""}) == CacheFlags()


def test_an_unknown_key_of_a_yaml_file_is_an_error_with_the_nearest_name(
    cache: Schema, tmp_path: Path
) -> None:
    (tmp_path / "prog.yaml").write_text("broker:\n  ratios: 1\n")
    with raises(Invalid, path=str(tmp_path / "prog.yaml"), says="broker.ratio?"):
        load(cache, directory=tmp_path)


def test_yaml_takes_nested_groups_lists_and_booleans(cache: Schema, tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(
        "broker:\n  cache: {size: 5, ttl: 3s}\n  names: [a, b]\n  fast: true\n  root:\n"
    )
    assert load(cache, [f"--config={path}"]) == CacheFlags(
        size=5, ttl=3.0, names=("a", "b"), fast=True
    )


def test_ini_names_may_be_written_as_the_original_writes_them(tmp_path: Path) -> None:
    (tmp_path / "gazette.ini").write_text(
        '[Broker]\n; a comment\nZone = "a"\nMaxAppendRate = 7\nfile_only = false\n[Etcd]\nLease = 30s\n'
    )
    loaded = schema().load([], {}, directory=tmp_path)
    assert loaded.group(BrokerFlags).zone == "a"
    assert loaded.group(BrokerFlags).max_append_rate == 7
    assert loaded.group(EtcdFlags).lease == 30.0


def test_files_are_searched_in_the_directory_and_then_below_home(
    cache: Schema, tmp_path: Path
) -> None:
    below = tmp_path / ".config" / "gazette"
    below.mkdir(parents=True)
    (below / "prog.ini").write_text("[broker]\nmode = b\n")
    here = tmp_path / "here"
    here.mkdir()
    assert load(cache, environ={"HOME": str(tmp_path)}, directory=here).mode == "b"
    (here / "prog.yaml").write_text("broker: {mode: a}\n")
    assert load(cache, environ={"HOME": str(tmp_path)}, directory=here).mode == "a"


def test_a_home_where_nothing_can_be_looked_up_has_no_file(cache: Schema, tmp_path: Path) -> None:
    """As for a service that runs as another user, with the HOME of root."""
    environ = {"HOME": f"/{'x' * 300}"}
    assert load(cache, environ=environ, directory=tmp_path) == CacheFlags()
    assert Contexts.load(environ).named == {}


@pytest.mark.parametrize("text", ["broker: [", "- a\n", "broker:\n\t- x"])
def test_a_file_that_cannot_be_read_is_named(cache: Schema, tmp_path: Path, text: str) -> None:
    (tmp_path / "prog.yaml").write_text(text)
    with raises(Invalid, path=str(tmp_path / "prog.yaml")):
        load(cache, directory=tmp_path)


def test_a_file_of_another_encoding_says_so(cache: Schema, tmp_path: Path) -> None:
    (tmp_path / "prog.ini").write_text("[broker]\n", encoding="utf-16")
    with raises(Invalid, path=str(tmp_path / "prog.ini"), says="not UTF-8"):
        load(cache, directory=tmp_path)


def test_the_printed_configuration_reads_back_and_holds_no_secret(
    cache: Schema, tmp_path: Path
) -> None:
    argv = ["--broker.cache.ttl=90s", "--broker.names=a,b", "--broker.key=hunter2", "--broker.fast"]
    argv.append("--broker.root=/line\u2028separator\x85")
    loaded = cache.load(argv, {}, directory=tmp_path)
    text = cache.render_ini(loaded)
    assert "hunter2" not in text
    assert "key is set; not shown" in text
    (tmp_path / "prog.ini").write_text(text)
    again = load(cache, ["--broker.key=hunter2"], directory=tmp_path)
    assert again == loaded.group(CacheFlags)


def test_every_flag_of_serve_has_the_names_of_the_original() -> None:
    """Environment names are what deployments set: these must not move."""
    env = {option.flag: option.env for option in schema().options}
    assert env["--broker.zone"] == "BROKER_ZONE"
    assert env["--broker.max-grpc-recv-size"] == "BROKER_MAX_GRPC_RECV_SIZE"
    assert env["--etcd.lease"] == "ETCD_LEASE_TTL"
    assert env["--etcd.trusted-ca-file"] == "ETCD_TRUSTED_CA_FILE"
    assert env["--broker.server-cert-key-file"] == "BROKER_SERVER_CERT_KEY_FILE"
    assert env["--log.level"] == "LOG_LEVEL"
    assert env["--debug.private"] == "DEBUG_PRIVATE"
    assert env["--workers"] == "GAZETTE_WORKERS"
    assert len(set(env.values())) == len(env)


def test_defaults_of_serve_are_those_of_the_original() -> None:
    loaded = schema().load([], {}, directory=Path("/nonexistent"))
    broker, etcd = loaded.group(BrokerFlags), loaded.group(EtcdFlags)
    assert (broker.zone, broker.limit, broker.max_replication) == ("local", 1024, 9)
    assert (broker.min_append_rate, broker.max_append_rate) == (65536, 0)
    assert broker.server_settings("here").streams_max == 3_024
    assert (broker.watch_delay, broker.max_grpc_recv_size) == (0.03, 4194304)
    assert (etcd.address, etcd.lease) == ("http://localhost:2379", 20.0)
    assert etcd.prefix == "/gazette/cluster"
    assert loaded.group(LogFlags) == LogFlags("warn", "text")
    assert loaded.group(DebugFlags) == DebugFlags("", private=False)
    assert loaded.group(ProcessFlags).workers == 1


def test_help_lists_flags_with_environment_names_and_ends_with_zero(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        schema().load(["--help"], {})
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--broker.zone STR" in text
    assert "[env ETCD_LEASE_TTL, default 20s]" in text


def test_a_wrong_configuration_is_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_config(["--broker.zone"], {}) == 2
    assert print_config(["--broker.limt=1"], {}) == 2
    assert "did you mean --broker.limit?" in capsys.readouterr().err
    stream = io.StringIO()
    assert exit_with(Invalid("no", path="x", hint="Do y."), stream) == 2
    assert stream.getvalue() == "x: no\nDo y.\n"


def test_etcd_endpoints_are_separated_by_commas() -> None:
    settings = EtcdFlags(address="http://a:1, http://b:2,", lease=40.0).settings()
    assert settings.endpoints == ("http://a:1", "http://b:2")
    assert settings.keepalive_s == 10.0


@pytest.mark.parametrize("lease_s", [1.0, 20.0, 24.0])
def test_etcd_is_asked_no_more_often_than_it_permits(lease_s: float) -> None:
    """By default it ends a connection that pings more often than each 5 s."""
    assert EtcdFlags(lease=lease_s).settings().keepalive_s > 5.5


@dataclass(frozen=True, slots=True)
class ReachFlags:
    address: str = setting("http://localhost:8080", "endpoint")
    trusted_ca_file: str = setting("", "CA")
    token: str = setting("", "token", secret=True)
    size: int = setting(0, "entries")


@pytest.mark.parametrize("line", ["address = http://stranger:1", "trusted-ca-file = stranger.pem"])
def test_the_working_directory_does_not_say_where_a_secret_goes(tmp_path: Path, line: str) -> None:
    """The file may be anyone's. It is used if it is named, or has the secret, or if no secret is set."""
    reach = Schema("prog", {"broker": ReachFlags}, file_stem="prog")
    here, home = tmp_path / "here", tmp_path / "home" / ".config" / "gazette"
    for directory in (here, home):
        directory.mkdir(parents=True)
    file = here / "prog.ini"
    file.write_text(f"[broker]\n{line}\nsize = 3\n")
    for argv, environ in (
        (["--broker.token=t"], {}),
        ([], {"BROKER_TOKEN": "t"}),
    ):
        with raises(Invalid, path=str(file), says=line.partition(" ")[0]) as refused:
            reach.load(argv, environ, directory=here)
        assert str(file) in str(refused.value)
        assert f"--config={file}" in refused.value.hint
        named = reach.load([*argv, f"--config={file}"], environ, directory=here)
        assert named.group(ReachFlags).token == "t"
        flags = ["--broker.address=http://mine:1", "--broker.trusted-ca-file=mine.pem"]
        assert reach.load([*argv, *flags], environ, directory=here).group(ReachFlags).size == 3
    assert reach.load([], {}, directory=here).group(ReachFlags).size == 3
    file.write_text(f"[broker]\n{line}\ntoken = t\n")
    assert reach.load([], {}, directory=here).group(ReachFlags).token == "t"
    file.rename(home / "prog.ini")
    environ = {"HOME": str(tmp_path / "home"), "BROKER_TOKEN": "t"}
    assert reach.load([], environ, directory=here).group(ReachFlags).token == "t"


@pytest.mark.parametrize("name", ["issuer", "audience", "claim", "roles", "jwks-url"])
def test_nor_whose_tokens_are_accepted(tmp_path: Path, name: str) -> None:
    server = Schema("prog", {"broker": MemberFlags}, file_stem="prog")
    (tmp_path / "prog.ini").write_text(f"[broker]\noidc-{name} = stranger\n")
    with raises(Invalid, says=f"oidc-{name}"):
        server.load([], {"BROKER_AUTH_KEYS": "k"}, directory=tmp_path)


@pytest.mark.parametrize("number", ["1_0", "١", "²", "0x10", "9" * 5000])
def test_numbers_are_ascii_digits(cache: Schema, tmp_path: Path, number: str) -> None:
    (tmp_path / "prog.yaml").write_text(f"broker: {{cache.size: {number}}}\n")
    for argv, environ, directory in (
        ([f"--broker.cache.size={number}"], {}, None),
        ([f"--broker.ratio={number}"], {}, None),
        ([], {"BROKER_CACHE_SIZE": number}, None),
        ([], {}, tmp_path),
    ):
        with raises(Invalid, says=f'"{number}"'):
            load(cache, argv, environ, directory=directory)


@dataclass(frozen=True, slots=True)
class BareFlags:
    zone: str = setting("local", "zone")
    port: int = setting(8080, "port", env="PROG_PORT")


def test_bare_names_of_the_environment_are_not_read() -> None:
    """Another program may have set them."""
    schema = Schema("prog", {"": BareFlags})
    loaded = schema.load([], {"ZONE": "east", "PORT": "1", "PROG_PORT": "2", "": "west"})
    assert loaded.group(BareFlags) == BareFlags(zone="local", port=2)
    text = schema.parser().format_help()
    assert "[default local]" in text
    assert "[env PROG_PORT, default 8080]" in text


def test_every_name_of_the_environment_has_a_prefix_of_ours() -> None:
    schemas = [schema(), *(schema_of(command) for command in COMMANDS)]
    names = {one.env for each in schemas for one in each.options if one.env and not one.flag_only}
    prefixes = ("GAZETTE_", "GAZCTL_", "BROKER_", "CONSUMER_", "ETCD_", "LOG_", "DEBUG_")
    assert [name for name in sorted(names) if not name.startswith(prefixes)] == []
    assert "GAZETTE_ZONE" in names


def test_a_file_may_begin_with_the_mark_of_editors_of_windows(tmp_path: Path) -> None:
    (tmp_path / "gazette.ini").write_bytes(b"\xef\xbb\xbf[broker]\r\nlimit = 7\r\n")
    assert schema().load([], {}, directory=tmp_path).sources["broker.limit"] != "default"


def test_a_check_of_a_path_leaves_the_files_beside_it(tmp_path: Path) -> None:
    beside = tmp_path / "offsets.json.partial"
    beside.write_text("of a user")
    require_writable(tmp_path / "offsets.json", "--offsets-out")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of a user"]
    with raises(Invalid, path="--offsets-out", says="no/offsets.json", advises="exists"):
        require_writable(tmp_path / "no" / "offsets.json", "--offsets-out")
