"""TLS and the bearer token of the metrics: real handshakes with certificates made by openssl."""

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from resolver import metrics
from resolver.base.errors import ResolverError, UsageError
from resolver.base.journal import Journal
from resolver.cli import in_force
from resolver.cli._bundle import facts
from resolver.config import Settings, load
from resolver.serve import pages, tls
from tests.fakes.certificates import certificate
from tests.fakes.pictures import picture
from tests.patience import PATIENCE_S, happens

TOKEN = "s3cr3t.token"  # noqa: S105


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    cert = certificate(tmp_path, "server")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return {
        "metrics_tls_cert": str(cert),
        "metrics_tls_key": str(cert.with_suffix(".key")),
        "metrics_token_file": str(tmp_path / "token"),
    }


class Metrics:
    """A client of the daemon's metrics port."""

    def __init__(self, port: int, journal: Journal) -> None:
        self.port, self.journal = port, journal

    async def connect(self, trusted: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context(cafile=trusted) if trusted else None
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=context)

    async def get(self, trusted: str = "", authorization: str = "", path: str = "/metrics") -> bytes:
        reader, writer = await self.connect(trusted)
        header = f"Authorization: {authorization}\r\n" if authorization else ""
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n".encode("latin-1"))
        answer = await reader.read()
        writer.transport.abort()
        return answer


@contextlib.asynccontextmanager
async def serving(**wanted: Any) -> AsyncIterator[Metrics]:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    served = Metrics(port, Journal())
    settings = Settings(metrics_addr=f"127.0.0.1:{port}", **wanted)
    task = asyncio.create_task(metrics.serve(picture, settings, served.journal))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield served
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def listening(served: Metrics) -> None:
    while True:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", served.port)),
        ):
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_the_right_token_over_tls_gets_the_metrics(
    files: dict[str, str], version: ssl.TLSVersion
) -> None:
    context = ssl.create_default_context(cafile=files["metrics_tls_cert"])
    context.minimum_version = context.maximum_version = version
    async with serving(**files) as served:
        await listening(served)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
        for last in ("keep-alive", "close"):
            request = (
                f"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: {last}\r\nAuthorization: bearer {TOKEN}\r\n"
            )
            writer.write(f"{request}\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            length = int(head.partition(b"content-length: ")[2].split()[0])
            assert b"resolver_build_info" in await reader.readexactly(length)
        writer.transport.abort()
        assert b" 400 Bad Request\r\n" in (plain := await served.get())
        assert plain.endswith(b"use https:// here\n")


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer wrong",
        f"Bearer {TOKEN}x",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer \xfc",
        f"Bearer {TOKEN[:-1]}",
    ],
)
async def test_another_token_or_none_is_refused(files: dict[str, str], authorization: str) -> None:
    del files["metrics_tls_cert"], files["metrics_tls_key"]
    async with serving(**files) as served:
        await listening(served)
        refused = await served.get(authorization=authorization)
        assert refused.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
        assert b'\r\nwww-authenticate: Bearer realm="resolver"\r\n' in refused
        assert b"resolver_build_info" not in refused
        assert b" 200 OK" in await served.get(path="/healthz")  # kubelet's probes have no token


async def test_slow_handshakes_delay_no_other_client(files: dict[str, str]) -> None:
    """The maximum of clients stop after their first record; the oldest of them are closed to make room."""
    hello, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=files["metrics_tls_cert"]).wrap_bio(
        out, hello, server_hostname="127.0.0.1"
    )
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    first = hello.read()
    async with serving(**files) as served:
        await listening(served)
        crowd = []
        for said in (first, first[:20], first[:-1], first + b"\x17\x03\x03\x00\x05wrong") * 12:
            crowd.append(await served.connect())
            crowd[-1][1].write(said)
        for _ in range(3):
            assert b" 200 OK" in await served.get(files["metrics_tls_cert"], f"Bearer {TOKEN}")
        for _, writer in crowd:
            writer.transport.abort()


async def test_bundle_has_the_metrics_of_a_port_with_tls_and_token(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(**files) as served:
        await listening(served)
        settings, _ = load({"metrics_addr": f"127.0.0.1:{served.port}", **files}, environ={})
        monkeypatch.setattr(
            in_force, "settings_in_force", lambda _: in_force.InForce(settings, {}, "the daemon")
        )
        assert "resolver_build_info" in await asyncio.to_thread(facts.metrics, "socket")
        foreign = in_force.InForce(settings, {"metrics_addr": "default"}, "no daemon answers")
        monkeypatch.setattr(in_force, "settings_in_force", lambda _: foreign)
        with pytest.raises(ResolverError, match="no daemon answers"):
            await asyncio.to_thread(facts.metrics, "socket")


async def test_client_turned_away_before_its_handshake_reads_nothing(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "LIMITS", pages.LIMITS._replace(waiting=1))
    async with serving(**files) as served:
        await listening(served)
        reader, writer = await served.connect()
        (_, other) = await served.connect()
        assert await reader.read() == b""
        for each in (writer, other):
            each.transport.abort()


async def test_changed_files_are_reread_and_broken_ones_unused(files: dict[str, str], tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    cert, token = Path(files["metrics_tls_cert"]), Path(files["metrics_token_file"])
    before = other / "before.crt"
    shutil.copy(cert, before)
    new = certificate(other, "new")
    async with serving(**files) as served:
        await listening(served)
        open_reader, open_writer = await served.connect(str(before))

        async def answers(trusted: Path, word: str) -> bool:
            try:
                return b" 200 OK" in await served.get(str(trusted), f"Bearer {word}")
            except ssl.SSLError:
                return False

        assert await answers(before, TOKEN)
        os.replace(new, cert)  # the new key follows a moment later
        assert await answers(before, TOKEN)
        ((event, why),) = served.journal.standing().items()
        assert event == "metrics_files_refused"
        assert "another certificate's key" in why
        (other / "token").write_text("meanwhile")
        os.replace(other / "token", token)
        assert await answers(before, "meanwhile")
        assert not await answers(before, TOKEN)
        token.write_text(TOKEN)
        os.replace(new.with_suffix(".key"), cert.with_suffix(".key"))
        assert await answers(cert, TOKEN)
        assert served.journal.standing() == {}
        assert not await answers(before, TOKEN)
        (other / "token").write_text("other")
        os.replace(other / "token", token)
        assert await answers(cert, "other")
        assert not await answers(cert, TOKEN)
        token.unlink()
        assert await answers(cert, "other")
        assert "No such file" in served.journal.standing()["metrics_files_refused"]
        # An earlier connection stays open, but needs the current token.
        open_writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer other\r\n\r\n")
        assert b" 200 OK" in await open_reader.readline()
        open_writer.transport.abort()


async def test_unusable_files_at_start_keep_the_port_closed(files: dict[str, str]) -> None:
    key = Path(files["metrics_tls_key"])
    kept = key.read_bytes()
    key.unlink()
    async with serving(**files) as served:
        await happens(served.journal.standing)
        assert served.journal.standing() == {
            "metrics_off": f"{key} can't be read (No such file or directory): it must exist, and root must own it"
        }
        with pytest.raises(ConnectionRefusedError):
            await served.connect()
        key.write_bytes(kept)
        await listening(served)
        assert b" 200 OK" in await served.get(files["metrics_tls_cert"], f"Bearer {TOKEN}")


def test_errors_name_the_file_and_the_cause(files: dict[str, str], tmp_path: Path) -> None:
    cert, key = files["metrics_tls_cert"], files["metrics_tls_key"]
    other = certificate(tmp_path, "other").with_suffix(".key")
    locked, empty = tmp_path / "locked.key", tmp_path / "empty"
    encrypt = ["openssl", "pkey", "-in", key, "-aes128", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(encrypt, check=True)
    empty.touch()
    for paths, words in (
        ((cert, str(other), ""), ("another certificate's key", cert, str(other))),
        ((cert, str(locked), ""), (f"{locked} holds no unencrypted private key as PEM",)),
        ((str(empty), key, ""), (f"{empty} holds no certificate as PEM",)),
        ((cert, str(empty), ""), (f"{empty} holds no unencrypted private key as PEM",)),
        ((str(tmp_path), key, ""), (f"{tmp_path} can't be read (Is a directory)",)),
        (("", "", str(empty)), (f"{empty} is empty",)),
        (("", "", str(tmp_path / "no")), ("can't be read (No such file",)),
    ):
        with pytest.raises(UsageError) as refused:
            tls.PortCredentials(*paths, lambda _: None)
        assert all(word in str(refused.value) for word in words), str(refused.value)
    both, trusted = tmp_path / "both.pem", tmp_path / "trusted.pem"
    both.write_bytes(Path(cert).read_bytes() + Path(key).read_bytes())
    subprocess.run(["openssl", "x509", "-trustout", "-in", cert, "-out", str(trusted)], check=True)
    for paths in ((str(both), "", ""), (str(trusted), key, "")):
        assert tls.PortCredentials(*paths, lambda _: None).session()
    with pytest.raises(UsageError, match="metrics_tls_key takes metrics_tls_cert"):
        load({"metrics_tls_key": key}, environ={})
