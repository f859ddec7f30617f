"""Certificates made by openssl."""

import subprocess
from pathlib import Path

#: Extensions of a CA, and of a server's certificate.
CA = "basicConstraints=critical,CA:TRUE"
SERVER = ("basicConstraints=critical,CA:FALSE", "subjectAltName=IP:127.0.0.1")


def certificate(directory: Path, name: str, extensions: tuple[str, ...] = SERVER, issuer: str = "") -> Path:
    """Make NAME.crt with NAME.key beside it, signed by ISSUER.crt there or by itself."""
    config = directory / "openssl.cnf"
    config.write_text("[req]\ndistinguished_name=dn\n[dn]\n")
    made, key = directory / f"{name}.crt", directory / f"{name}.key"
    by = ("-CA", directory / f"{issuer}.crt", "-CAkey", directory / f"{issuer}.key") if issuer else ()
    options = [part for each in extensions for part in ("-addext", each)]
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    command = ["openssl", "req", "-x509", "-config", config, *curve, "-subj", f"/CN={name}", *by, *options]
    subprocess.run([*command, "-keyout", key, "-out", made], check=True, capture_output=True)
    return made
