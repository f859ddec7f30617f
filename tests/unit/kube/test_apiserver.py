"""The CAs of clusters that kubectl accepts, made by openssl, at a real TLS server."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from resolver.base.errors import ApiServerFailed
from resolver.kube.apiserver import ApiServer
from tests.fakes.certificates import CA, SERVER, certificate

NO_IDS = ("subjectKeyIdentifier=none", "authorityKeyIdentifier=none")
ANY = "keyUsage=critical,digitalSignature,keyEncipherment,keyCertSign"
#: By kind of cluster: extensions of the CA and of the server's certificate.
KINDS = {
    "kubeadm": ((CA, ANY, "subjectKeyIdentifier=hash"), (*SERVER, "authorityKeyIdentifier=keyid")),
    "k3s": ((CA, ANY, "subjectKeyIdentifier=hash"), (*SERVER, *NO_IDS)),
    "without key usage": ((CA, *NO_IDS), (*SERVER, *NO_IDS)),
    "not critical": (("basicConstraints=CA:TRUE", "keyUsage=keyCertSign"), SERVER),
}


async def asked(certificate: Path, account: Path) -> Any:
    """Return the answer of a TLS server with this certificate to a client with this account."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n" + b'{"a": "yes"}')
        await writer.drain()
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    client = ApiServer(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", str(account))
    try:
        return await client.get("/")
    finally:
        await client.close()
        server.close()


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an account directory, with the TLS defaults of Python 3.13."""
    default = ssl.create_default_context

    def strict(**more: Any) -> ssl.SSLContext:
        context = default(**more)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    (tmp_path / "token").write_text("t")
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_the_cas_that_kubectl_accepts_are_accepted(kind: str, account: Path) -> None:
    of_ca, of_server = KINDS[kind]
    certificate(account, "ca", of_ca)
    served = certificate(account, "apiserver", of_server, "ca")
    assert asyncio.run(asked(served, account)) == {"a": "yes"}


def test_intermediate_ca_bundle_is_accepted(account: Path) -> None:
    certificate(account, "root", (CA, "keyUsage=critical,keyCertSign"))
    signer = certificate(account, "signer", (CA, "keyUsage=critical,keyCertSign"), "root")
    certificate(account, "other", (CA,))
    served = certificate(account, "apiserver", SERVER, "signer")
    (account / "ca.crt").write_text((account / "other.crt").read_text() + signer.read_text())
    assert asyncio.run(asked(served, account)) == {"a": "yes"}


def test_another_ca_and_another_name_are_refused(account: Path) -> None:
    certificate(account, "ca", (CA,))
    certificate(account, "other", (CA,))
    foreign = certificate(account, "foreign", SERVER, "other")
    unnamed = certificate(account, "unnamed", ("subjectAltName=IP:127.0.0.2",), "ca")
    for served in (foreign, unnamed):
        with pytest.raises(ApiServerFailed, match="certificate verify failed"):
            asyncio.run(asked(served, account))
