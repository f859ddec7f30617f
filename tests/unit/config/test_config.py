"""Settings: the precedence of their origins, and one message for each mistake."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resolver import config
from resolver.base.errors import UsageError
from resolver.base.source_records import SourceName
from resolver.config import HostpidNamespace, Settings, changed, described


def load(*given: Any, **more: Any) -> Settings:
    return config.load(*given, **more)[0]


def from_file(tmp_path: Path, text: str | bytes) -> Settings:
    path = tmp_path / "resolver.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load(file=str(path), environ={})


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "resolver.toml"
    file.write_text('interval = "100ms"\nnvml-interval = 2\nrun_dir = "/run/file"\nlog_level = "debug"\n')
    environ = {"RESOLVER_NVML_INTERVAL": "3", "RESOLVER_RUN_DIR": "/run/env", "RESOLVER_CONFIG": str(file)}
    settings = load({"run_dir": "/run/flag"}, environ=environ)
    assert settings.interval == 0.1
    assert settings.nvml_interval == 3.0
    assert settings.run_dir == "/run/flag"
    assert settings.log_level == "debug"
    assert settings.hostpid_namespace is HostpidNamespace.AUTO


def test_changed_settings_are_one_line() -> None:
    line = changed(described(*config.load({}, environ={"RESOLVER_INTERVAL": "250ms"})))
    assert line == "all at their defaults"
    line = changed(described(*config.load({"dry_run": True}, environ={"RESOLVER_INTERVAL": "1s"})))
    assert line == "interval=1s (environment RESOLVER_INTERVAL), dry_run=true (command line)"


@pytest.mark.parametrize(
    ("name", "text", "meant"),
    [
        ("containers_dir", "/a", ("/a",)),
        ("containers_dir", "/a::/b:", ("/a", "/b")),
        ("map_size", "4096", 4096),
        *(("dry_run", text, True) for text in ("1", "true", "YES", "On")),
        *(("dry_run", text, False) for text in ("0", "false", "No", "off")),
    ],
)
def test_value_in_the_environment_is_parsed(tmp_path: Path, name: str, text: str, *, meant: object) -> None:
    file = tmp_path / "resolver.toml"
    file.write_text(f"dry_run = {str(not meant).lower()}")
    settings = load(file=str(file), environ={f"RESOLVER_{name.upper()}": text})
    assert getattr(settings, name) == meant


def test_several_directories_are_flags_or_a_list(tmp_path: Path) -> None:
    assert load({"containers_dir": ["/a", "/b:c"]}, environ={}).containers_dir == ("/a", "/b:c")
    assert from_file(tmp_path, 'containers_dir = ["/a", "/b"]').containers_dir == ("/a", "/b")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RESOLVER_DRYRUN", "did you mean RESOLVER_DRY_RUN"),
        ("RESOLVER_CONTAINER_DIR", "did you mean RESOLVER_CONTAINERS_DIR"),
        ("RESOLVER_CONFIG_FILE", "did you mean RESOLVER_CONFIG"),
        ("RESOLVER_Source", "did you mean RESOLVER_SOURCE"),
        ("RESOLVER_METRICS_PORT", "did you mean RESOLVER_METRICS_ADDR"),
        ("RESOLVER_GPU_DETAILS", "remove it; there are .* RESOLVER_DRY_RUN,"),
    ],
)
def test_misspelt_variable_is_refused_with_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: there is no such setting; {hint}"):
        load(environ={name: "true", "RESOLVER_INTERVAL": "1s"})


def test_foreign_and_empty_environment_variables_are_no_settings() -> None:
    environ = {
        "RESOLVER_INTERVAL": "",
        "RESOLVER_DRYRUN": "",
        "INTERVAL": "1h",
        "resolver_dry_run": "1",
        "RESOLVER_SERVICE_HOST": "10.0.0.1",
        "RESOLVER_SERVICE_PORT": "9395",
        "RESOLVER_SERVICE_PORT_METRICS": "9395",
        "RESOLVER_PORT": "tcp://10.0.0.1:9395",
        "RESOLVER_PORT_9395_TCP": "tcp://[fd00::1]:9395",
        "RESOLVER_PORT_9395_TCP_PROTO": "tcp",
        "RESOLVER_PORT_9395_TCP_PORT": "9395",
        "RESOLVER_PORT_9395_TCP_ADDR": "10.0.0.1",
        "RESOLVER_METRICS_SERVICE_HOST": "10.0.0.1",
        "RESOLVER_METRICS_PORT": "tcp://10.0.0.1:9395",
        "RESOLVER_METRICS_PORT_53_UDP_ADDR": "10.0.0.1",
        "RESOLVER_NODE": "gpu-7",
        "RESOLVER_REPORT_METRICS_ADDR": ":9396",
    }
    assert load(environ=environ) == Settings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("interval = 0", ["interval (file ", "0 is not possible", "10ms to 3600s"]),
        ("interval = 3601", ["interval", "3601", "3600"]),
        ("interval = nan", ["interval", "nan"]),
        ("interval = true", ["interval", "True"]),
        ('interval = "soon"', ["interval", "'soon'", "250ms"]),
        ('interval = "5ms"', ["'5ms' is not possible: write a duration from 10ms to 3600s, such as 250ms"]),
        ("interval = 1s", ["not valid TOML", "line 1", "put text in quotes"]),
        ("nvml_interval = 1979-05-27", ["nvml_interval", "1979"]),
        ('dry_run = "maybe"', ["dry_run", "'maybe'", "true or false"]),
        ('hostpid_namespace = "guest"', ["hostpid_namespace", "'guest'", "auto, host, container"]),
        ("write_utilization = false", ["write_utilization", "False", "auto, always, never"]),
        ('source = "tea"', ["source", "'tea'", ", ".join(SourceName)]),
        ('log_level = "loud"', ["log_level", "'loud'", "debug, info, warning, error"]),
        ("containers_dir = 5", ["containers_dir", "5", "a list of paths"]),
        ('containers_dir = ""', ["containers_dir", "''", "a list of paths"]),
        ('containers_dir = "foo"', ["containers_dir", "'foo' is not an absolute path: begin it with /"]),
        *(
            (f'{name} = "rel/x"', [name, "'rel/x' is not possible: it is not an absolute path"])
            for name in ("run_dir", "socket", "broker", "tenant_socket", "pod_logs_dir", "metrics_token_file")
        ),
        ('containers_dir = ["/a", ""]', ["containers_dir", "empty"]),
        ("intervall = 1", ["intervall", "no such setting", "did you mean interval?"]),
        ("once = true", ["once", "no such setting"]),
        ("[hami]\ninterval = 1", ["hami", "no such setting"]),
        ("interval = 1\nnvml_interval = \nrun_dir = 1", ["not valid TOML", "line 2"]),
        (b"run_dir = '\xff'", ["not valid TOML", "save it as UTF-8"]),
    ],
)
def test_error_in_a_file_is_one_sentence(tmp_path: Path, text: str | bytes, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        from_file(tmp_path, text)
    for word in (*words, str(tmp_path)):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "name", "value", "says"),
    [
        ({}, "RESOLVER_INTERVAL", "soon", "RESOLVER_INTERVAL: 'soon' .* 250ms"),
        ({}, "RESOLVER_CONTAINERS_DIR", ":", "RESOLVER_CONTAINERS_DIR: ':' .*a list of paths"),
        ({"interval": "9h"}, "RESOLVER_INTERVAL", "1s", r"interval \(command line\): '9h' is not possible"),
        (
            {"interval": "1s"},
            "RESOLVER_INTERVAL",
            "soon",
            "RESOLVER_INTERVAL",
        ),  # although another origin would override it
    ],
)
def test_wrong_value_is_refused_under_its_written_name(
    flags: dict[str, str], name: str, value: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        load(flags, environ={name: value})


@pytest.mark.parametrize("name", ["run_dir", "socket", "broker", "tenant_socket"])
def test_too_long_socket_path_is_refused(name: str) -> None:
    room = 99 - len("/resolver.sock" if name == "run_dir" else "")
    load({name: f"/run/{'x' * 9}/".ljust(room, "x")}, environ={})
    with pytest.raises(UsageError, match="is too long for a Unix socket: choose a path of at most 99 bytes"):
        load({name: f"/run/{'x' * 9}/".ljust(room + 1, "x")}, environ={})


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "nothing.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=why) as caught:
            load(file=str(path), environ={})
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("user", "mode", "why"), [(0, 0o646, "chmod o-w"), (4711, 0o644, "belongs to user 4711: chown")]
)
def test_file_that_another_user_can_change_is_refused(tmp_path: Path, user: int, mode: int, why: str) -> None:
    path = tmp_path / "resolver.toml"
    path.write_text("dry_run = false\n")
    path.chmod(mode)
    os.chown(path, user, -1)
    with pytest.raises(UsageError, match=why):
        load(file=str(path), environ={})


def test_setting_in_both_spellings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="twice"):
        from_file(tmp_path, "nvml-interval = 1\nnvml_interval = 2\n")


_VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text()), st.binary()
)


@given(st.dictionaries(st.sampled_from([*Settings.__struct_fields__, "other"]), _VALUES, max_size=3))
def test_any_value_gives_settings_or_one_message(values: dict[str, Any]) -> None:
    try:
        settings = load(values, environ={})
    except UsageError:
        return
    assert 0.01 <= settings.interval <= 3600
    assert 0.01 <= settings.nvml_interval <= 3600
    assert settings.containers_dir
    assert all(isinstance(path, str) and path for path in settings.containers_dir)


@pytest.mark.parametrize("path", ["/run/resolver/tenants.sock", "/run/tenants.sock", "/tenants.sock"])
def test_tenant_socket_in_roots_directory_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match=r"tenant_socket: .* /run/resolver/tenants/resolver.sock"):
        load({"tenant_socket": path}, environ={})


@pytest.mark.parametrize("path", ["/run/resolver/tenants/resolver.sock", "/run/tenants/resolver.sock"])
def test_tenant_socket_in_a_separate_directory_is_accepted(path: str) -> None:
    assert load({"tenant_socket": path}, environ={}).tenant_socket == path
