"""Print the path of the llama-cpp-python source archive, fetching it with pip when no path is given.

    fetch_sdist.py VERSION SHA256 FOLDER [PATH]

PATH, else the environment variable H2OG_LLAMA_SDIST, else FOLDER if it was fetched before, else pip.
The archive is checked against SHA256 in every case.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NO_NETWORK = (
    "Without a network, fetch it elsewhere with\n"
    "    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python=={version}\n"
    "and name the file with -DH2OG_LLAMA_SDIST=PATH or in the environment variable H2OG_LLAMA_SDIST."
)


class FetchError(Exception):
    """The archive could not be had, or is not the right one."""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check(path: Path, wanted: str, said_by: str) -> Path:
    """Return path if it is the archive with that sum.  Raises FetchError."""
    if not path.is_file():
        raise FetchError(f"{said_by} names {path}, and there is no such file")
    if (found := sha256(path)) != wanted:
        raise FetchError(
            f"{path} ({said_by}) is not the source archive this version is built on: "
            f"sha256 {found}, expected {wanted}"
        )
    return path


def fetch(version: str, wanted: str, folder: Path) -> Path:
    """Return the archive in folder, downloading it with this Python's pip when it is not there yet."""
    target = folder / f"llama_cpp_python-{version}.tar.gz"
    if target.is_file() and sha256(target) == wanted:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # What configures our own build must not reach the build that pip runs to read the archive's metadata.
    env = {k: v for k, v in os.environ.items() if not k.startswith("SKBUILD") and k != "CMAKE_ARGS"}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", "llama-cpp-python", "--dest", temporary, f"llama-cpp-python=={version}"]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found = list(Path(temporary).glob("*.tar.gz"))
        if done.returncode != 0 or len(found) != 1:
            raise FetchError(
                f"pip could not fetch the source of llama-cpp-python {version}:\n{done.stdout.rstrip()}\n"
                + NO_NETWORK.format(version=version)
            )
        check(found[0], wanted, "fetched by pip")
        return found[0].replace(target)


def main() -> int:
    if len(sys.argv) not in (4, 5):
        print(__doc__, file=sys.stderr)
        return 2
    version, wanted, folder = sys.argv[1:4]
    try:
        if len(sys.argv) == 5 and sys.argv[4]:
            path = check(Path(sys.argv[4]), wanted, "H2OG_LLAMA_SDIST")
        elif given := os.environ.get("H2OG_LLAMA_SDIST"):
            path = check(Path(given), wanted, "the environment variable H2OG_LLAMA_SDIST")
        else:
            path = fetch(version, wanted, Path(folder))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path.resolve().as_posix())
    return 0


if __name__ == "__main__":
    sys.exit(main())
