"""A stand-in for the Hugging Face hub on this machine: the requests that huggingface_hub makes without Xet.

Repositories live in memory. `python tests/stand_in_hub.py` serves one until it is interrupted; the token `hf_writer`
may write to repositories of `me`, and `hf_reader` may only read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

LARGE = 1 << 12
"""Files of at least this size are sent as large files, as on the hub those above some megabytes."""
BINARY = (".safetensors", ".parquet", ".bin")


@dataclass
class Repo:
    """A repository. commits: {revision: {path: content}}. branches: {name: revision}."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        number = len(self.commits)
        revision = hashlib.sha1(f"{number} {message} {sorted(files)}".encode()).hexdigest()
        self.commits[revision] = files
        self.branches[branch] = revision
        self.messages.append(message)
        return revision

    def files(self, revision: str) -> dict[str, bytes] | None:
        return self.commits.get(self.branches.get(revision, revision))


class Refused(Exception):
    """Ends a request with a response."""

    def __init__(self, response: Response) -> None:
        self.response = response


@dataclass
class StandInHub:
    """The state of the server, which tests read and change.

    users: {token: (name, role)}. objects: large files by their SHA-256. uploads: the large files that were sent, in
    order. refuse: {beginning of a path of the server: status} of requests to refuse. requests: all, as `METHOD PATH`.
    """

    users: dict[str, tuple[str, str]] = field(
        default_factory=lambda: {"hf_writer_token": ("me", "write"), "hf_reader_token": ("me", "read")}
    )
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: list[str] = field(default_factory=list)
    refuse: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def app(self) -> Starlette:
        model = "/api/models/{owner}/{name}"
        return Starlette(
            routes=[
                Route("/api/whoami-v2", self._whoami),
                Route("/api/validate-yaml", self._validate, methods=["POST"]),
                Route("/api/repos/create", self._create, methods=["POST"]),
                Route(f"{model}/auth-check", self._auth),
                Route(f"{model}/auth-check/write", self._auth_write),
                Route(f"{model}/refs", self._refs),
                Route(f"{model}/commits/{{revision}}", self._commits),
                Route(f"{model}/branch/{{revision}}", self._branch, methods=["POST"]),
                Route(f"{model}/preupload/{{revision}}", self._preupload, methods=["POST"]),
                Route(f"{model}/commit/{{revision}}", self._commit, methods=["POST"]),
                Route(f"{model}/tree/{{revision}}", self._tree),
                Route(f"{model}/revision/{{revision}}", self._info),
                Route(model, self._info),
                Route("/{owner}/{name}.git/info/lfs/objects/batch", self._batch, methods=["POST"]),
                Route("/objects/{oid}", self._put, methods=["PUT"]),
                Route("/{owner}/{name}/resolve/{revision}/{path:path}", self._resolve, methods=["GET", "HEAD"]),
            ],
            exception_handlers={Refused: lambda request, error: error.response},
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Record the request, and refuse it if the test wants that."""
        if scope["type"] == "http":
            self.requests.append(f"{scope['method']} {scope['path']}")
            for start, status in self.refuse.items():
                if scope["path"].startswith(start):
                    await JSONResponse({"error": "refused by the test"}, status)(scope, receive, send)
                    return
        await self.app()(scope, receive, send)

    def user(self, request: Request) -> tuple[str, str]:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        return self.users.get(token, ("", ""))

    def repo(self, request: Request, write: bool = False) -> Repo:
        name, role = self.user(request)
        owner, repo = request.path_params["owner"], request.path_params["name"]
        found = self.repos.get(f"{owner}/{repo}")
        if found is None or (found.private and name != owner):
            missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            raise Refused(JSONResponse({"error": "Repository not found"}, 404 if name else 401, missing))
        if write and (role != "write" or name != owner):
            raise Refused(JSONResponse({"error": "Forbidden: you may not write here"}, 403))
        return found

    def files(self, request: Request, repo: Repo) -> dict[str, bytes]:
        """The files of the request's revision."""
        files = repo.files(request.path_params.get("revision", "main"))
        if files is None:
            missing = {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}
            raise Refused(JSONResponse({"error": "Invalid rev id"}, 404, missing))
        return files

    async def _whoami(self, request: Request) -> Response:
        name, role = self.user(request)
        if not name:
            return JSONResponse({"error": "Invalid username or password."}, 401)
        return JSONResponse({"type": "user", "name": name, "auth": {"accessToken": {"role": role}}})

    async def _validate(self, request: Request) -> Response:
        return JSONResponse({"errors": [], "warnings": []})

    async def _create(self, request: Request) -> Response:
        given = await request.json()
        name, role = self.user(request)
        owner = given.get("organization") or name
        if not name:
            return JSONResponse({"error": "Invalid username or password."}, 401)
        url = f"{self.url}/{owner}/{given['name']}"
        if f"{owner}/{given['name']}" in self.repos:
            return JSONResponse({"error": "You already created this model repo", "url": url}, 409)
        if role != "write" or owner != name:
            return JSONResponse({"error": "Forbidden: you don't have the rights"}, 403)
        repo = Repo(given.get("visibility") == "private" or given.get("private") is True)
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self.repos[f"{owner}/{given['name']}"] = repo
        return JSONResponse({"url": url})

    async def _auth(self, request: Request) -> Response:
        self.repo(request)
        return JSONResponse({})

    async def _auth_write(self, request: Request) -> Response:
        self.repo(request, write=True)
        return JSONResponse({})

    async def _branch(self, request: Request) -> Response:
        repo = self.repo(request, write=True)
        name = request.path_params["revision"]
        if name in repo.branches:
            return JSONResponse({"error": "Reference already exists"}, 409)
        start = (await request.json()).get("startingPoint", "main")
        repo.branches[name] = repo.branches.get(start, start)
        return JSONResponse({})

    async def _refs(self, request: Request) -> Response:
        repo = self.repo(request)
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in repo.branches.items()
        ]
        return JSONResponse({"branches": branches, "converts": [], "tags": []})

    async def _commits(self, request: Request) -> Response:
        """All commits, the newest first, as if there were one branch."""
        repo = self.repo(request)
        entries = [
            {"id": revision, "authors": [], "date": "2026-01-01T00:00:00.000Z", "title": message, "message": ""}
            for revision, message in zip(repo.commits, repo.messages, strict=True)
        ]
        return JSONResponse(entries[::-1])

    async def _preupload(self, request: Request) -> Response:
        repo = self.repo(request, write=True)
        there = self.files(request, repo)
        modes = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if _is_large(one["path"], one["size"]) else "regular",
                "shouldIgnore": False,
                "oid": _oid(one["path"], there[one["path"]]) if one["path"] in there else None,
            }
            for one in (await request.json())["files"]
        ]
        return JSONResponse({"files": modes})

    async def _batch(self, request: Request) -> Response:
        self.repo(request, write=True)
        objects = []
        for one in (await request.json())["objects"]:
            found = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.objects:
                found["actions"] = {"upload": {"href": f"{self.url}/objects/{one['oid']}"}}
            objects.append(found)
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def _put(self, request: Request) -> Response:
        content, oid = await request.body(), request.path_params["oid"]
        if hashlib.sha256(content).hexdigest() != oid:
            return JSONResponse({"error": "the content has another SHA-256"}, 400)
        self.objects[oid] = content
        self.uploads.append(oid)
        return Response()

    async def _commit(self, request: Request) -> Response:
        repo = self.repo(request, write=True)
        branch, files, message = request.path_params["revision"], dict(self.files(request, repo)), ""
        for line in (await request.body()).splitlines():
            row = json.loads(line)
            value = row["value"]
            match row["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.objects:
                        return JSONResponse({"error": f"{value['path']} was not sent"}, 400)
                    files[value["path"]] = self.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
                case "deletedFolder":
                    files = {path: one for path, one in files.items() if not path.startswith(value["path"])}
        revision = repo.commit(branch, files, message)
        url = f"{self.url}/{request.path_params['owner']}/{request.path_params['name']}/commit/{revision}"
        return JSONResponse({"commitUrl": url, "commitOid": revision, "pullRequestUrl": None})

    async def _info(self, request: Request) -> Response:
        repo = self.repo(request)
        wanted, files = request.path_params.get("revision", "main"), self.files(request, repo)
        name = f"{request.path_params['owner']}/{request.path_params['name']}"
        sha = repo.branches.get(wanted, wanted)
        facts = {"id": name, "modelId": name, "sha": sha, "private": repo.private, "tags": [], "downloads": 0}
        return JSONResponse(facts | {"siblings": [{"rfilename": path} for path in sorted(files)]})

    async def _tree(self, request: Request) -> Response:
        files = self.files(request, self.repo(request))
        return JSONResponse([_entry(path, content) for path, content in sorted(files.items())])

    async def _resolve(self, request: Request) -> Response:
        repo = self.repo(request)
        wanted, path, files = request.path_params["revision"], request.path_params["path"], self.files(request, repo)
        if path not in files:
            missing = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return JSONResponse({"error": "Entry not found"}, 404, missing)
        content = files[path]
        sha256 = hashlib.sha256(content).hexdigest()
        etag = sha256 if _is_large(path, len(content)) else _oid(path, content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": repo.branches.get(wanted, wanted)}
        response = Response(b"" if request.method == "HEAD" else content, 200, headers)
        if request.method == "HEAD":
            response.headers["Content-Length"] = str(len(content))
        return response


def _is_large(path: str, size: int) -> bool:
    return size >= LARGE or path.endswith(BINARY)


def _oid(path: str, content: bytes) -> str:
    """The id that huggingface_hub compares: SHA-256 of a large file, git's of another."""
    if _is_large(path, len(content)):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if _is_large(path, len(content)):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


@contextmanager
def serving(hub: StandInHub, port: int = 0) -> Iterator[StandInHub]:
    """A block during which the stand-in answers at `hub.url`, on a free port of this machine."""
    server = uvicorn.Server(uvicorn.Config(hub, host="127.0.0.1", port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, name="stand-in hub", daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline, "the stand-in hub did not start"
        time.sleep(0.01)
    hub.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield hub
    finally:
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    with serving(StandInHub(), port=int(sys.argv[1]) if len(sys.argv) > 1 else 0) as stand_in:
        print(f"export HF_ENDPOINT={stand_in.url} HF_HUB_DISABLE_XET=1", flush=True)
        threading.Event().wait()
