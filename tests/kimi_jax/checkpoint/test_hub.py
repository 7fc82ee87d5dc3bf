"""Fetching from a hub: a server on this machine that answers the four requests that huggingface_hub makes.

`GET /api/models/ID/revision/main` (the commit), `GET /api/models/ID/tree/COMMIT` (the files), `HEAD` and `GET
/ID/resolve/COMMIT/FILE` (what a file is, and its bytes, also from an offset).
"""

import builtins
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_jax.checkpoint import CheckpointError, CheckpointReader
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.hub import resolve
from tests.kimi_jax.checkpoint.sources import k3_config, random_checkpoint

REPOSITORY = "owner/Kimi-Tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """Serves one repository from a folder.

    Attributes:
        requests: (method, file, first byte asked for) of every request for a file.
        cut: files whose next body is cut off in the middle.
        broken: files that are answered with status 500.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.requests: list[tuple[str, str, int]] = []
        self.cut: set[str] = set()
        self.broken: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> list[str]:
        return [file for method, file, _ in self.requests if method == "GET"]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        api = f"/api/models/{REPOSITORY}"
        files = sorted(self.server.root.iterdir())
        if path == f"{api}/revision/main":
            siblings = [{"rfilename": file.name} for file in files]
            self.reply({"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "siblings": siblings})
        elif path == f"{api}/tree/{COMMIT}":
            self.reply(
                [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": etag(file)} for file in files]
            )
        elif path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/"):
            self.file(self.server.root / path.rpartition("/")[2])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def reply(self, tree: object) -> None:
        body = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def file(self, file: Path) -> None:
        data = file.read_bytes()
        asked = self.headers.get("Range", "bytes=0-")
        begin = int(asked.removeprefix("bytes=").partition("-")[0])
        self.server.requests.append((self.command, file.name, begin))
        if file.name in self.server.broken:
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{etag(file)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        if file.name in self.server.cut:
            self.server.cut.remove(file.name)
            self.wfile.write(data[begin : len(data) // 2])
            self.close_connection = True
            return
        self.wfile.write(data[begin:])


def etag(file: Path) -> str:
    return hashlib.sha256(file.name.encode()).hexdigest()[:40]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    root = random_checkpoint(tmp_path / "served", k3_config(), shard_bytes=200_000)
    (root / "kimi_jax.json").unlink()
    (root / "tiktoken.model").write_text("tokens")
    for name in ("modeling_kimi_k3.py", "pytorch_model.bin", "training_args.pkl"):
        (root / name).write_text("must not be fetched")
    server = Hub(root)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(hub: Hub, tmp_path: Path) -> Path:
    return resolve(REPOSITORY, progress=False, endpoint=hub.address, cache=tmp_path / "cache")


def test_weights_and_text_are_fetched_and_nothing_that_could_be_run(tmp_path: Path, hub: Hub) -> None:
    found = fetch(hub, tmp_path)
    assert {path.name for path in found.iterdir()} == {
        path.name for path in hub.root.iterdir() if path.suffix not in (".py", ".bin", ".pkl")
    }
    for path in found.iterdir():
        assert path.read_bytes() == (hub.root / path.name).read_bytes()
    assert not {"modeling_kimi_k3.py", "pytorch_model.bin", "training_args.pkl"} & {file for _, file, _ in hub.requests}
    # The cache holds links into its own store, which readers and converters follow.
    assert CheckpointReader(found).names() == CheckpointReader(hub.root).names()
    convert(found, tmp_path / "orbax", progress=False, verify=True)


def test_a_cut_connection_is_resumed_and_nothing_is_fetched_twice(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library keeps what it has received in units of this size, 10 MiB unless told otherwise.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)
    (shard, *_) = sorted(path.name for path in hub.root.glob("*.safetensors"))
    hub.cut.add(shard)
    fetch(hub, tmp_path)
    begins = [begin for method, file, begin in hub.requests if (method, file) == ("GET", shard)]
    assert begins == [0, (hub.root / shard).stat().st_size // 2 // 1024 * 1024]
    hub.requests.clear()
    fetch(hub, tmp_path)
    assert hub.fetched() == []


def test_a_download_that_failed_goes_on_with_what_is_missing(tmp_path: Path, hub: Hub) -> None:
    shards = sorted(path.name for path in hub.root.glob("*.safetensors"))
    hub.broken.add(shards[-1])
    with pytest.raises(CheckpointError, match=f"'{REPOSITORY}' can't be fetched from the Hugging Face hub: "):
        fetch(hub, tmp_path)
    before = set(hub.fetched())
    hub.broken.clear()
    hub.requests.clear()
    found = fetch(hub, tmp_path)
    assert shards[-1] in hub.fetched()
    assert not before & set(hub.fetched())
    assert (found / shards[0]).read_bytes() == (hub.root / shards[0]).read_bytes()


def test_an_unknown_repository_is_named(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="'owner/absent' can't be fetched"):
        resolve("owner/absent", progress=False, endpoint=hub.address, cache=tmp_path / "cache")


def test_paths_are_never_taken_for_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("models", "models/absent", "./owner/name", "/owner/name", "owner/name/part", "name"):
        assert resolve(path) == Path(path)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def absent(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return original(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(CheckpointError, match=r"'moonshotai/Kimi-K3' is no directory.*pip install 'kimi-jax\[hub\]'"):
        resolve("moonshotai/Kimi-K3")
